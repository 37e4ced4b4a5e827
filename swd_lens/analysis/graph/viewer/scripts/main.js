// The page: its bar, search, keys, help, print; and the first drawing.

let SEARCH = "";
const matches = node => !SEARCH || [titleOf(node), node.name, node.text, node.of ?? "", promotedBy(node.of) ?? "", siteWords(node), groupOf(node)?.name ?? "", node.head ?? ""]
  .some(text => text.toLowerCase().includes(SEARCH));

const KEYS = [
  ["\u2190 \u2191 \u2192 \u2193", "from node to node"], ["Enter", "pin, or let go of, the node"], ["Space", "mark it; g groups what is marked"], ["c", "clamp the unit"],
  ["l", "type a label"], ["/", "search; Enter goes on to the next"], ["f", "fit into view"], ["+ \u2212", "zoom"], ["p", "pinned nodes only, or all"], ["t", "table or graph"], ["Esc", "nothing selected"], ["?", "this page"],
];

function arrange() {
  const graph = STATE.view === "graph";
  byId("stage").hidden = !graph;
  byId("tables").hidden = graph;
  document.body.dataset.view = STATE.view;
  for (const [id, on] of [["as-graph", graph], ["as-table", !graph], ["show-all", STATE.only === "all"], ["show-pinned", STATE.only === "pinned"]]) byId(id).setAttribute("aria-pressed", on);
  byId("n-pinned").textContent = STATE.pins.size;
  const most = Math.max(1, ...GRAPHS.map(g => g.edges.length)), n = Math.min(most, STATE.edges ?? most);
  const slider = byId("edges");
  if (document.activeElement !== slider) slider.value = Math.round(1000 * Math.sqrt(n / most));
  if (document.activeElement !== byId("influence")) byId("influence").value = Math.round(1000 * STATE.influence);
  byId("influence-said").textContent = STATE.influence >= 1 ? "all nodes" : `top ${percent(STATE.influence)}`;
}

// How much is drawn now; header, slider, legend, panel and tables all say these numbers.
function countsOf(scene) {
  const looks = { p: 0, n: 0, a: 0 };
  for (const edge of scene.drawn) looks[edge.kind === "attention" ? "a" : signClass(edge.value)] += 1;
  return { nodes: scene.items.reduce((n, item) => n + item.nodes.length, 0), edges: scene.drawn.size, ...looks };
}
const outOf = (n, all, word) => n === all ? plural(all, word) : `${count(n)} of ${plural(all, word)}`;
function drawnWords(graph) {
  const drawn = countsOf(SCENES.find(scene => scene.graph === graph));
  return `${outOf(drawn.nodes, graph.nodes.length, "node")} and ${outOf(drawn.edges, graph.edges.length, "edge")} drawn`;
}
function tell() {
  const drawn = SCENES.map(countsOf), sum = name => drawn.reduce((n, of) => n + of[name], 0), all = GRAPHS.reduce((n, g) => n + g.edges.length, 0);
  const facts = [GRAPHS[0].model, GRAPHS[0].prompts > 1 ? `${GRAPHS[0].prompts} aligned prompts` : "",
    ...GRAPHS.map((graph, i) => (GRAPHS.length > 1 ? `graph ${i + 1}: ` : "") + drawnWords(graph))];
  byId("subtitle").textContent = facts.filter(Boolean).join(" \u00b7 ");
  byId("edges-said").textContent = sum("edges") === all ? `all ${count(all)}` : `${count(sum("edges"))} of ${count(all)}`;
  for (const look of ["p", "n", "a"]) { const at = byId(`legend-${look}`); if (at) at.textContent = count(sum(look)); }
}

// What the page shows, in one sentence.
function sentence() {
  const [graph] = GRAPHS, of = kind => graph.nodes.filter(node => node.kind === kind), units = of("unit").length, possible = graph.edges_possible;
  const strongest = possible > graph.edges.length ? `The ${count(graph.edges.length)} strongest of ${plural(possible, "edge")}` : `The ${plural(graph.edges.length, "edge")}`;
  if (!graph.has_prompt) return `${strongest} between ${plural(units, "unit")}: how much of what one writes the other reads, whatever the prompt.`;
  const answers = of("logit").sort((a, b) => (b.probability ?? 0) - (a.probability ?? 0)).map(node => `\u201c${node.text || node.name}\u201d`);
  const named = answers.slice(0, 3).join(", ") + (answers.length > 3 ? ` and ${answers.length - 3} more` : "");
  const positions = new Set(of("unit").map(node => node.position)).size, made = answers.length ? ` give ${answers.length === 1 ? "the answer" : "the answers"} ${named}` : " feed each other";
  const beside = GRAPHS.length > 1 ? "; beside it the same on another prompt" : "";
  return `${strongest} through which ${[plural(of("token").length, "token"), plural(units, "unit")].filter(text => !text.startsWith("0 ")).join(" and ")} at ${plural(positions, "position")}${made}: tokens below, answers on top${beside}.`;
}

function mark() {
  for (const scene of SCENES) {
    for (const item of scene.items) scene.boxOf(item).classList.toggle("match", Boolean(SEARCH) && item.nodes.some(matches));
    scene.svg.classList.toggle("searching", Boolean(SEARCH));
  }
}
function nextMatch(step) {
  const found = SCENES.flatMap(scene => scene.items.filter(item => item.nodes.some(matches)).map(item => item.lead));
  if (!SEARCH || !found.length) { say(SEARCH ? "Nothing drawn matches" : "Search for a label, token or unit"); return; }
  const next = found[(found.indexOf(STATE.selected) + step + found.length) % found.length];
  select(next);
  const scene = SCENES.find(s => s.graph === next.graph);
  requestAnimationFrame(() => { const item = scene.itemAt(next); if (item) scene.reveal(item); });
  say(`${described(next)}; ${plural(found.length, "match")}`.replace("matchs", "matches"));
}

// The next box in a direction: in its row, or in the nearest row above or below.
function walk(key) {
  const scene = SCENES.find(s => s.svg.contains(document.activeElement)) ?? SCENES.find(s => s.itemAt(STATE.selected)) ?? SCENES[0];
  const from = document.activeElement?.item ?? scene.itemAt(STATE.selected);
  if (!from) { if (scene.items.length) select(scene.items.find(item => item.lead.kind === "logit")?.lead ?? scene.items[0].lead, true); return; }
  const across = key === "ArrowLeft" || key === "ArrowRight", sign = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
  const cost = item => {
    const dx = item.x - from.x, dy = item.y - from.y;
    if (across) return item.row === from.row && Math.abs(dy) < BOX.height && sign * dx > 0 ? sign * dx : Infinity;
    return sign * dy > 1 ? sign * dy * 3 + Math.abs(dx) : Infinity;
  };
  const next = scene.items.filter(item => item !== from && cost(item) < Infinity).sort((a, b) => cost(a) - cost(b))[0];
  if (next) select(next.lead, true);
}

function onKey(event) {
  const typing = event.target.matches("input[type=text], input[type=search], textarea, select"), key = event.key;
  if (key === "Escape") {
    if (byId("help").open) return;
    if (event.target.id === "search") { event.target.value = SEARCH = ""; }
    byId("menu").open = false;
    STATE.marked.clear();
    event.target.blur?.();
    select(null);
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const onBox = Boolean(event.target.item), free = onBox || event.target === document.body || event.target.id === "stage", node = onBox ? event.target.item.lead : STATE.selected;
  const acts = {
    "/": () => byId("search").focus(), "?": showHelp, f: () => SCENES.forEach(scene => scene.fit()), t: () => show(STATE.view === "graph" ? "table" : "graph"),
    p: () => only(STATE.only === "all" ? "pinned" : "all"), g: () => STATE.marked.size > 1 && select(groupNodes([...STATE.marked]).members[0], true),
    c: () => node && canClamp(node) && toggleClamp(node), l: () => byId("panel").querySelector("[data-key=label]")?.focus(),
    "+": () => SCENES.forEach(scene => scene.zoomBy(1.25)), "=": () => SCENES.forEach(scene => scene.zoomBy(1.25)), "-": () => SCENES.forEach(scene => scene.zoomBy(0.8)),
  };
  if (free && STATE.view === "graph" && key.startsWith("Arrow")) walk(key);
  else if (onBox && key === "Enter") event.target.item.nodes.forEach(togglePin);
  else if (onBox && key === " ") { for (const n of event.target.item.nodes) if (!STATE.marked.delete(n)) STATE.marked.add(n); changed(false); }
  else if (acts[key]) acts[key]();
  else return;
  event.preventDefault();
}

const show = view => { STATE.view = view; changed(); };
const only = which => {
  STATE.only = which;
  changed();
  requestAnimationFrame(() => requestAnimationFrame(() => SCENES.forEach(scene => { scene.fitted = false; scene.fit(); })));
};

function showHelp() {
  const graph = GRAPHS[0], bar = name => make("i", { class: `swatch ${name}` });
  byId("help").replaceChildren(
    make("h2", {}, "What is shown"),
    make("p", {}, "Rows are the model's sites in the order of execution, answers on top; columns are the prompt's positions. A box is a unit at a position; its title is its label, or in italics the tokens that it promotes. An edge is what its source gives to its target along the direct path, everything else held: orange and solid adds, blue and dashed takes away, green runs through attention, its pattern held."),
    make("p", {}, "The bar in a box says what its activation is made of: ", bar("drawn"), " edges drawn now, ", bar("hidden-part"), " edges not drawn, ", bar("rest"), " rest, which no edge explains (units outside the graph, dense matrices, biases, curvature). The three add up to the activation."),
    make("h3", {}, "Live clamp"),
    make("p", {}, "A clamped unit is set to a multiple of its z at its position. \u201cAll frozen paths\u201d holds the norms' scales, attention patterns and the slopes of the activation functions at this run, and lets everything else respond: all attached units, drawn or not, and all dense matrices. It leaves out what these three do when they move; the gap to a true run is just that. \u201cDrawn edges only\u201d follows the edges that are drawn now, so the pruning sliders change it."),
    make("h3", {}, "Keys"),
    make("dl", { class: "keys" }, KEYS.map(([key, words]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, words)))),
    make("p", { class: "soft" }, "Drag a box onto another one to group them; Shift and a click marks several. Drag the ground to move, Ctrl and the wheel to zoom. The address keeps pins, groups, labels and sliders."),
    make("p", { class: "soft" }, `swd_lens ${DATA.version}${graph.model ? `, model ${graph.model}` : ""}`),
    make("form", { method: "dialog" }, make("button", {}, "Close")));
  byId("help").showModal();
}

// On paper the whole graph stands in a frame of a page's width; what is drawn is drawn before the browser lays the pages out.
function forPaper(printing) {
  document.documentElement.classList.toggle("printing", printing);
  for (const scene of SCENES) {
    const view = scene.view;
    scene.printing = printing;
    scene.measure();
    scene.draw();
    if (printing) { scene.before = view; scene.fitted = true; scene.fit(); } else { scene.view = scene.before; scene.apply(); }
  }
}

function legend() {
  const line = (name, dashed) => make("svg", { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true" }, make("line", { x1: 1, x2: 25, y1: 4, y2: 4, class: name, "stroke-dasharray": dashed ? "5 3" : null }));
  const graph = GRAPHS[0], attention = GRAPHS.some(g => g.edges.some(edge => edge.kind === "attention"));
  const counted = look => make("b", { id: `legend-${look}`, title: "edges drawn now" });
  const unnamed = GRAPHS.some(g => g.nodes.some(node => node.kind === "unit" && !labelOf(node.of)));
  const arrow = make("svg", { viewBox: "0 0 9 10", width: 9, height: 10, "aria-hidden": "true", class: "leaving" }, make("path", { d: "M0 5l8 -4.5v9z" }));
  byId("legend").replaceChildren(
    make("li", {}, line("p"), "adds", counted("p")), make("li", {}, line("n", true), "takes away", counted("n")), attention ? make("li", {}, line("a"), "through attention", counted("a")) : "",
    attention ? make("li", { title: "An arrow on the window's rim: attention edges go on to, or come from, a token outside it" }, arrow, "leaves the window") : "",
    unnamed ? make("li", { title: "Names in italics are no labels: they are the tokens that the unit promotes, or its number" }, make("em", {}, "italics"), "no label: tokens it promotes, or its number") : "",
    graph.has_prompt ? make("li", { title: "What a box's activation is made of" }, make("i", { class: "swatch drawn" }), "drawn", make("i", { class: "swatch hidden-part" }), "not drawn", make("i", { class: "swatch rest" }), "rest") : "");
}

function start() {
  rememberOriginal();
  byId("sentence").textContent = sentence();
  GRAPHS.forEach(graph => SCENES.push(new Scene(graph, byId("stage"))));
  byId("stage").classList.toggle("two", GRAPHS.length > 1);
  const on = (id, event, act) => byId(id).addEventListener(event, act);
  on("as-graph", "click", () => show("graph"));
  on("as-table", "click", () => show("table"));
  on("show-all", "click", () => only("all"));
  on("show-pinned", "click", () => only("pinned"));
  on("fit", "click", () => SCENES.forEach(scene => scene.fit()));
  on("help-button", "click", showHelp);
  on("save-labels", "click", saveLabels);
  on("save-state", "click", saveState);
  on("load-state", "change", event => { if (event.target.files[0]) openState(event.target.files[0]); event.target.value = ""; });
  on("open-state", "click", () => byId("load-state").click());
  on("print", "click", () => window.print());
  on("reset", "click", () => { STATE = freshState(); startGroups(); SCENES.forEach(scene => { scene.fitted = false; }); changed(); requestAnimationFrame(() => SCENES.forEach(scene => scene.fit())); });
  on("search", "input", event => { SEARCH = event.target.value.trim().toLowerCase(); if (STATE.view === "table") changed(false); else mark(); });
  on("search", "keydown", event => { if (event.key === "Enter") { event.preventDefault(); nextMatch(event.shiftKey ? -1 : 1); } });
  on("edges", "input", event => { const most = Math.max(...GRAPHS.map(g => g.edges.length)), n = Math.round(most * (event.target.value / 1000) ** 2); STATE.edges = n >= most ? null : n; changed(); });
  on("influence", "input", event => { STATE.influence = event.target.value / 1000; changed(); });
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", event => { if (!byId("menu").contains(event.target) || event.target.closest(".menu button")) byId("menu").open = false; });
  addEventListener("hashchange", () => { if (decodeState()) changed(false); });
  DARK.addEventListener("change", () => { COLOURS = {}; SCENES.forEach(scene => scene.apply()); });
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
  if (!decodeState()) startGroups();
  legend();
  WATCHERS.push(arrange, () => SCENES.forEach(scene => scene.draw()), tell, drawTables, drawPanel, mark);
  WATCHERS.forEach(watch => watch());
}
start();
