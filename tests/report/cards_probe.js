// Measures every output of a page of frames: contrast of all text against what is painted behind it, and text that is cut.
// A frame holds one output in a notebook's page; what is wrong comes back as name -> sentences.
function probeCard(frame, mayScroll) {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement, wrong = [];
  const need = (fine, what) => { if (!fine) wrong.push(what); };
  const fetched = view.performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:"));
  need(fetched.length === 0, `fetched ${fetched.map(entry => entry.name)}`);
  page.querySelectorAll("details").forEach(folded => { folded.open = true; });
  // Everything has to be in view: what lies behind a point is asked of the view alone.
  frame.height = Math.max(root.scrollHeight, page.body.scrollHeight) + 20;
  need(root.scrollWidth <= root.clientWidth, `the page is ${root.scrollWidth - root.clientWidth} pixels too wide`);
  for (const box of page.querySelectorAll("body *")) {
    const style = view.getComputedStyle(box), over = box.scrollWidth - box.clientWidth;
    if (box.closest("svg") || over <= 1 || style.display === "inline") continue;
    if (["auto", "scroll"].includes(style.overflowX)) need(mayScroll, `${over} pixels to the right of ${tell(box)}`);
    if (["hidden", "clip"].includes(style.overflowX)) need(false, `${over} pixels cut off ${tell(box)}`);
  }
  let texts = 0;
  const walker = page.createTreeWalker(page.body, view.NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, title, desc, metadata") || !element.checkVisibility()) continue;
    texts += 1;
    const range = page.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(box => box.width > 1);
    const picture = element.closest("svg");
    if (picture) inside(element, picture);
    for (const box of boxes.slice(0, 2)) for (const share of [0.1, 0.5, 0.9]) contrast(element, box, share);
  }
  need(texts > 2, "nothing is written here");
  return [...new Set(wrong)];

  function tell(element) { return element.outerHTML.slice(0, 100); }
  function inside(element, picture) {
    const text = element.getBoundingClientRect(), whole = picture.getBoundingClientRect();
    const over = Math.max(whole.left - text.left, text.right - whole.right, whole.top - text.top, text.bottom - whole.bottom);
    need(over <= 1.5, `${over.toFixed(0)} pixels of "${element.textContent}" outside its picture`);
  }
  function contrast(element, box, share) {
    const x = box.left + share * box.width, y = box.top + box.height / 2;
    const stack = page.elementsFromPoint(x, y);
    const from = stack.findIndex(one => one === element || one.contains(element));
    if (from < 0) return;  // scrolled out of sight
    const behind = stack.slice(from).reverse().reduce((below, layer) => over(painted(layer, element), below), [255, 255, 255, 1]);
    const style = view.getComputedStyle(element), svg = element.closest("svg");
    const [r, g, b, a] = parse(svg ? style.fill : style.color);
    const ratio = between(light(over([r, g, b, a * solid(element)], behind)), light(behind));
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    need(ratio >= (large ? 3 : 4.5), `contrast ${ratio.toFixed(2)} of "${element.textContent.slice(0, 40)}" ${tell(element)}`);
  }
  // What an element paints below a text: shapes their fill, boxes their ground.
  function painted(layer, element) {
    const style = view.getComputedStyle(layer);
    if (layer.closest("svg") && layer.tagName !== "svg") {
      if (layer === element || ["text", "tspan", "g", "image", "line"].includes(layer.tagName) || style.fill === "none") return [0, 0, 0, 0];
      const [r, g, b, a] = parse(style.fill);
      return [r, g, b, a * Number(style.fillOpacity) * solid(layer)];
    }
    const [r, g, b, a] = parse(style.backgroundColor);
    return [r, g, b, a * solid(layer)];
  }
  function solid(element) {
    let opacity = 1;
    for (let at = element; at; at = at.parentElement) opacity *= Number(view.getComputedStyle(at).opacity);
    return opacity;
  }
  function parse(text) {
    const [r, g, b, a = 1] = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    return [r, g, b, a];
  }
  function over([r, g, b, a], [x, y, z]) { return [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1]; }
  function light([r, g, b]) {
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  }
  function between(a, b) { return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }
}
