// What is known of a node: briefly beside the pointer, in full in the panel, with its edges in and out and its label to type.

function select(node, focus = false) {
  SELECTED_LINK = null;
  if (STATE.selected === node && !focus) { changed(false); return; }
  STATE.selected = node;
  if (node) say(described(node));
  changed();
  if (focus && node) requestAnimationFrame(() => {
    const scene = SCENES.find(s => s.graph === node.graph), item = scene?.itemAt(node);
    if (item) { scene.reveal(item); scene.boxOf(item).focus({ preventScroll: true }); }
  });
}

// ---------------------------------------------------------------------------------------------- beside the pointer

let hoverKey = null;
function showHover(item, x, y) {
  const box = byId("hover"), key = item.group ?? item.lead;
  if (hoverKey !== key) {
    hoverKey = key;
    box.replaceChildren(...(item.group ? groupBrief(item) : nodeBrief(item.lead)));
  }
  moveHover(x, y);
}
function showLinkHover(link, x, y) {
  if (hoverKey !== link) {
    hoverKey = link;
    byId("hover").replaceChildren(
      make("p", { class: "title" }, `${nameOfItem(link.source)} \u2192 ${nameOfItem(link.target)}`),
      make("p", {}, make("b", { class: `value ${signClass(link.value)}` }, number(link.value)), ` ${sizeWord(link.parts[0].graph)}, ${kindsOf(link)}`),
      ...variesLine(link.parts),
      link.attention ? make("p", { class: "soft" }, hasPaths(link) ? "Click: heads and query-key pairs" : "through attention, its pattern held") : "",
    );
  }
  moveHover(x, y);
}
function moveHover(x, y) {
  const box = byId("hover");
  box.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = box, wide = innerWidth, high = innerHeight;
  box.style.left = `${Math.max(6, x + 18 + w > wide ? x - w - 18 : x + 18)}px`;
  box.style.top = `${Math.max(6, Math.min(high - h - 8, y + 14))}px`;
}
function hideHover() { byId("hover").hidden = true; hoverKey = null; }

const nameOfItem = item => item.group ? item.group.name : titleOf(item.lead);
const sizeWord = graph => graph.has_prompt ? "contribution" : "weight";
const kindsOf = link => [...new Set(link.parts.map(edge => edge.kind))].map(kind => ({
  residual: "through the residual stream", attention: "through attention", mlp: "through the MLP's activation",
})[kind] ?? kind).join(" and ");
const variesLine = edges => edges.length === 1 && edges[0].varies !== null && edges[0].varies !== undefined
  ? [make("p", { class: "soft" }, `${percent(edges[0].varies)} of it varies over the prompts`)] : [];

function nodeBrief(node) {
  const known = node.of ? DATA.units[node.of] ?? {} : {};
  return [make("p", { class: "title" }, titleOf(node)), make("p", { class: "soft" }, placeOf(node)), figures(node),
    ...(known.histogram ? [histogram(known)] : []),
    ...(known.promoted ? [make("p", {}, make("span", { class: "soft" }, "promotes "), tokens(known.promoted.slice(0, 6)))] : []),
    ...(known.contexts ? [contexts(known, 3)] : [])];
}
function groupBrief(item) {
  return [make("p", { class: "title" }, item.group.name), make("p", { class: "soft" }, plural(item.nodes.length, "node")),
    make("ul", { class: "plain" }, item.nodes.slice(0, 8).map(node => make("li", {}, `${titleOf(node)} `, make("span", { class: "soft" }, placeOf(node)))))];
}
function figures(node) {
  const facts = [];
  if (node.activation !== null) facts.push([node.kind === "logit" ? "logit less the mean" : node.kind === "token" ? null : "z", number(node.activation)]);
  if (node.influence !== null) facts.push(["influence", percent(node.influence)]);
  if (node.rank !== null) facts.push(["rank", `${count(node.rank)}`], ["score", number(node.score)]);
  if (node.head !== null) facts.push(["head", node.head]);
  const change = changeOfNode(node);
  if (change !== null) facts.push(["predicted \u0394", number(change)]);
  return make("dl", { class: "figures" }, facts.filter(([name]) => name).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
const tokens = pairs => pairs.map(([token, value]) => make("span", { class: `token ${signClass(value)}`, title: number(value) }, token));

function contexts(known, n) {
  if (!known.contexts.length) return make("p", { class: "soft" }, "It is 0 on every token of the text.");
  const largest = Math.max(...known.contexts.flatMap(([, , z]) => z.map(v => Math.abs(v ?? 0))));
  return make("ol", { class: "contexts" }, known.contexts.slice(0, n).map(([peak, pieces, z]) => make("li", {},
    make("span", { class: "num" }, number(z[peak])),
    make("span", { class: "words" }, pieces.map((piece, i) => {
      const s = largest ? Math.abs(z[i] ?? 0) / largest : 0;
      return make(i === peak ? "mark" : "span", s < 0.05 ? {} : { class: signClass(z[i]), style: `--s:${s.toFixed(2)}` }, piece);
    })))));
}
function histogram(known) {
  const { start, width, counts } = known.histogram, most = Math.log1p(Math.max(...counts)), W = 260, H = 46;
  const low = Math.min(0, start), high = Math.max(0, start + width * counts.length), x = z => (z - low) / (high - low) * W;
  const words = `z on ${count(known.tokens_heard)} tokens from ${number(start)} to ${number(start + width * counts.length)}; active on ${percent(known.density)}`;
  return make("figure", { class: "histogram" },
    make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": words },
      counts.map((n, i) => n ? make("rect", { class: start + width * i < 0 ? "n" : "p", x: x(start + width * i).toFixed(2), width: Math.max(0.6, W * width / (high - low) - 0.2).toFixed(2), y: (H - Math.log1p(n) / most * (H - 2)).toFixed(2), height: (Math.log1p(n) / most * (H - 2)).toFixed(2) }) : ""),
      make("line", { x1: x(0), x2: x(0), y1: 0, y2: H })),
    make("figcaption", { class: "soft" }, `${words}; heights logarithmic`));
}

// ---------------------------------------------------------------------------------------------- the panel

let SELECTED_LINK = null;
function selectLink(link) {
  SELECTED_LINK = link;
  STATE.selected = null;
  say(`edge from ${nameOfItem(link.source)} to ${nameOfItem(link.target)}, ${number(link.value)}`);
  changed();
}

function drawPanel() {
  const panel = byId("panel"), active = document.activeElement, node = STATE.selected;
  // What is being typed or dragged in the panel stays as it is.
  if (panel.contains(active) && active.matches("input[type=text], textarea, input[type=range]") && panel.dataset.of === panelKey()) { refreshClamp(); return; }
  const again = panel.contains(active) && active.dataset.key;
  panel.dataset.of = panelKey();
  const marked = [...STATE.marked];
  panel.replaceChildren(
    ...(marked.length > 1 ? [make("section", { class: "marked" }, make("p", {}, `${plural(marked.length, "node")} marked `,
      make("button", { type: "button", "data-key": "group", onclick: () => { const made = groupNodes(marked); select(made.members[0]); } }, "Group them  g")))] : []),
    ...clampPanel(),
    ...(SELECTED_LINK ? linkPanel(SELECTED_LINK) : node ? nodePanel(node) : overview()));
  if (again) panel.querySelector(`[data-key="${CSS.escape(again)}"]`)?.focus({ preventScroll: true });
}
const panelKey = () => SELECTED_LINK ? "link" : STATE.selected ? `node ${STATE.selected.id}` : "none";

function nodePanel(node) {
  const known = node.of ? DATA.units[node.of] ?? {} : {}, group = groupOf(node);
  return [make("section", {},
    make("h2", {}, titleOf(node)), make("p", { class: "soft" }, placeOf(node)), figures(node),
    make("p", { class: "actions" },
      make("button", { type: "button", "data-key": "pin", "aria-pressed": String(isPinned(node)), onclick: () => togglePin(node) }, isPinned(node) ? "Pinned" : "Pin"),
      canClamp(node) ? make("button", { type: "button", "data-key": "clamp", "aria-pressed": String(STATE.clamps.has(node)), onclick: () => toggleClamp(node) }, STATE.clamps.has(node) ? "Clamped" : "Clamp") : ""),
    group ? groupEditor(group, node) : "",
    node.of ? labelEditor(node.of) : "", madeOf(node)),
  ...(known.histogram || known.promoted || known.contexts ? [make("section", {}, make("h3", {}, "What it does"),
    known.facts?.length ? make("p", { class: "soft" }, known.facts.join(" \u00b7 ")) : "",
    known.histogram ? histogram(known) : "",
    known.promoted ? make("p", {}, make("span", { class: "soft" }, "promotes "), tokens(known.promoted)) : "",
    known.suppressed ? make("p", {}, make("span", { class: "soft" }, "suppresses "), tokens(known.suppressed)) : "",
    known.contexts ? contexts(known, 5) : "")] : []),
  edgeList("Edges in", node, "source"), edgeList("Edges out", node, "target")];
}

function labelEditor(unit) {
  const about = { ...DATA.units[unit], ...STATE.labels[unit] };
  const save = () => setLabel(unit, { label: label.value, note: note.value });
  const label = make("input", { type: "text", "aria-label": "Label", value: about.label ?? "", placeholder: "what it seems to be", "data-key": "label", oninput: save, maxlength: 200 });
  const note = make("input", { type: "text", "aria-label": "Note", value: about.note ?? "", placeholder: "a remark", "data-key": "note", oninput: save, maxlength: 2000 });
  return make("div", { class: "form" }, make("label", {}, make("span", {}, "Label"), label), make("label", {}, make("span", {}, "Note"), note));
}
function groupEditor(group, node) {
  const rename = make("input", { type: "text", "aria-label": "Name of the group", value: group.name, "data-key": "group-name", maxlength: 200, oninput: () => { group.name = rename.value.trim() || "group"; changed(); } });
  return make("div", { class: "form group-form" }, make("label", {}, make("span", {}, "Group"), rename),
    make("p", { class: "actions" },
      make("button", { type: "button", "data-key": "open", "aria-expanded": String(group.open), onclick: () => { group.open = !group.open; changed(); } }, group.open ? "Close" : "Open"),
      make("button", { type: "button", "data-key": "leave", onclick: () => leaveGroup(node) }, "Take this node out"),
      make("button", { type: "button", "data-key": "dissolve", onclick: () => { STATE.groups = STATE.groups.filter(g => g !== group); changed(); } }, "Dissolve")),
    make("ul", { class: "plain members" }, group.members.map(member => make("li", {}, nodeLink(member)))));
}
const nodeLink = node => make("button", { type: "button", class: "link", "data-key": `to-${node.id}`, onclick: () => select(node, true) }, titleOf(node), make("span", { class: "soft" }, ` ${placeOf(node)}`));

// How the activation adds up: drawn + not drawn + rest.
function madeOf(node) {
  if (node.rest === null || node.activation === null || node.kind === "token") return "";
  const scene = SCENES.find(s => s.graph === node.graph), [drawn, hidden, rest] = sums({ nodes: [node] }, scene.drawn);
  const rows = [["drawn", "edges drawn now", drawn], ["hidden-part", "edges not drawn", hidden], ["rest", "rest: no edge explains it", rest]];
  const most = Math.max(...rows.map(row => Math.abs(row[2])), 1e-30);
  return make("table", { class: "made" }, make("caption", {}, `What makes ${node.kind === "logit" ? "the logit" : "z"}`), make("tbody", {},
    rows.map(([name, words, value]) => make("tr", {}, make("th", { scope: "row" }, words),
      make("td", {}, make("div", { class: `swatch ${name}`, style: `width:${(100 * Math.abs(value) / most).toFixed(1)}%` })), make("td", { class: "num" }, number(value)))),
    make("tr", { class: "total" }, make("th", { scope: "row" }, node.kind === "logit" ? "logit less the vocabulary's mean" : "z"), make("td"), make("td", { class: "num" }, number(node.activation)))));
}

function edgeList(title, node, end) {
  const edges = [...(end === "source" ? node.in : node.out)].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  if (!edges.length) return "";
  const most = Math.abs(edges[0].value) || 1, scene = SCENES.find(s => s.graph === node.graph);
  const list = make("ol", { class: "edges" }, edges.map(edge => make("li", { class: scene.drawn.has(edge) ? null : "undrawn" },
    make("i", { class: edge.kind === "attention" ? "a" : signClass(edge.value), style: `width:${(100 * Math.abs(edge.value) / most).toFixed(1)}%` }),
    nodeLink(edge[end]),
    edge.kind === "attention" && hasPaths({ parts: [edge] }) ? make("button", { type: "button", class: "chip", "data-key": `paths-${edge.rank}`, title: "Heads and query-key pairs", onclick: () => selectLink(linkOf(edge)) }, "heads") : "",
    make("span", { class: "num", title: `weight ${number(edge.weight)}, ${edge.kind}` }, number(edge.value)))));
  return make("details", { open: edges.length < 60 || null }, make("summary", {}, `${title} (${edges.length})`), list);
}
const linkOf = edge => ({ source: { lead: edge.source, nodes: [edge.source], group: null }, target: { lead: edge.target, nodes: [edge.target], group: null }, parts: [edge], value: edge.value, attention: edge.kind === "attention" });

function overview() {
  return GRAPHS.map(graph => make("section", {}, make("h2", {}, GRAPHS.length > 1 ? `Graph ${graph.index + 1}` : "The graph"),
    graph.prompt ? make("p", { class: "prompt" }, graph.prompts > 1 ? `${graph.prompts} aligned prompts, as ` : "", promptLine(graph)) : "",
    make("p", { class: "soft" }, `${drawnWords(graph)}. Point at a node to see what it does; click it for its edges.`),
    make("ol", { class: "edges answers" }, graph.nodes.filter(node => node.kind === "logit").map(node => make("li", {}, nodeLink(node), make("span", { class: "num" }, number(node.activation)))))));
}
