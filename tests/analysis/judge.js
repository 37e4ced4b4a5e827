// Opens circuit-tracer's page (judge.html?query -> index.html?query) and does what a reader does: hover, prune, look at the pinned.
(async () => {
  const frame = document.createElement("iframe");
  frame.width = 1500; frame.height = 1100; frame.src = "index.html" + location.search;
  document.body.append(frame);
  const found = {};
  try { Object.assign(found, await judge(frame)); } catch (error) { found.failed = error.stack; }
  found.complaints = frame.contentWindow.complaints;
  document.body.innerHTML = "<pre id=found></pre>";
  document.getElementById("found").textContent = JSON.stringify(found);
})();

async function judge(frame) {
  const pause = ms => new Promise(done => setTimeout(done, ms));
  const until = async (what, most = 100) => { for (let i = 0; i < most && !what(); i++) await pause(100); };
  const page = () => frame.contentDocument;
  const all = selector => [...page().querySelectorAll(selector)];
  const drawn = () => all(".link-graph text.node");
  await until(() => page() && drawn().length);
  await pause(1000);
  const datum = element => element.__data__;
  const kinds = {};
  for (const node of drawn()) kinds[datum(node).feature_type] = (kinds[datum(node).feature_type] || 0) + 1;
  const placed = drawn().filter(node => datum(node).pos.every(Number.isFinite)).length;
  const sums = Object.fromEntries(drawn().map(node => [datum(node).node_id, datum(node).sourceLinks.reduce((sum, link) => sum + link.weight, 0)]));
  const rows = Object.fromEntries(drawn().map(node => [datum(node).node_id, datum(node).streamIdx]));
  const sliders = all(".slider-container input");
  const result = {
    kinds, placed, sums, rows,
    ids: drawn().map(node => datum(node).node_id),
    ticks: all(".link-graph .y text").map(text => text.textContent).filter(Boolean),
    pinned: drawn().filter(node => node.classList.contains("pinned")).length,
    supernodes: all(".subgraph .supernode-container").map(box => datum(box).node).filter(node => node.isSuperNode).map(node => node.ppClerp),
    boxes: all(".subgraph .supernode-container").map(box => datum(box)).map(box => ({ row: box.node.streamIdx, x: box.x, y: box.y })),
    listed: all("select.graph-prompt-select option").map(option => option.value),
    sliders: sliders.length,
  };
  // Hover a unit that has examples, then one of each other kind.
  const hover = async node => {
    const graph = page().querySelector(".link-graph"), box = graph.getBoundingClientRect();
    const at = node.getBoundingClientRect();
    const place = { clientX: at.left + at.width / 2, clientY: at.top + at.height / 2, bubbles: true };
    graph.dispatchEvent(new frame.contentWindow.MouseEvent("mousemove", place));
    await pause(700);
    return { examples: all(".feature-example-list .ctx-container").length,
             groups: all(".feature-example-list .quantile-title").map(title => title.textContent.trim()),
             logits: all(".feature-example-logits .token").map(token => token.textContent),
             title: all(".feature-detail .feature-title, .feature-detail .header-top-row").map(t => t.textContent)[0] || "",
             tooltip: page().querySelector(".tooltip").textContent };
  };
  result.hovered = {};
  for (const kind of Object.keys(kinds)) {
    result.hovered[kind] = await hover(drawn().find(node => datum(node).feature_type === kind));
  }
  // Click the last unit: what goes in and out is listed.
  const unit = drawn().filter(node => datum(node).feature_type === "cross layer transcoder" && datum(node).sourceLinks.length).at(-1);
  if (unit) {
    const at = unit.getBoundingClientRect();
    const place = { clientX: at.left + at.width / 2, clientY: at.top + at.height / 2, bubbles: true };
    page().querySelector(".link-graph").dispatchEvent(new frame.contentWindow.MouseEvent("click", place));
    await pause(500);
    result.clicked = { id: datum(unit).node_id, inputs: all(".features.input .feature-row").length, sources: datum(unit).sourceLinks.length };
  }
  // The slider: fewer nodes below, all of them again at its end.
  result.pruned = {};
  for (const threshold of ["0.3", "1"]) {
    const slider = page().querySelector(".slider-container input");
    if (!slider) break;
    slider.value = threshold;
    slider.dispatchEvent(new frame.contentWindow.Event("input", { bubbles: true }));
    await pause(2500);
    result.pruned[threshold] = drawn().length;
  }
  // Saved by the page, with what is open now in it.
  page().querySelector("button.save-button").click();
  await until(() => page().querySelector("button.save-button").textContent === "Saved!", 20);
  result.saved = page().querySelector("button.save-button").textContent;
  return result;
}
