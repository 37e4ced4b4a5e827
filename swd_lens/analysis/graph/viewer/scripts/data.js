// The page's data as objects: graphs with nodes and edges that know each other, units by name; numbers and text as they are shown.

const DATA = JSON.parse(document.getElementById("data").textContent);
const MINUS = "\u2212";
const byId = id => document.getElementById(id);

// Makes an element: make("p", { class: "soft", onclick: f }, "text", child, ...). Text is text, never HTML.
function make(name, about = {}, ...children) {
  const svg = MAKES_SVG.has(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}
const MAKES_SVG = new Set(["svg", "g", "rect", "text", "path", "line", "circle", "title", "tspan"]);

// Three digits, a sign, a true minus; a dash for what is undefined.
function number(value, signed = true) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  let text = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
  text = text.replace("-", MINUS).replace("e+", "e");
  return signed && value > 0 ? "+" + text : text;
}
const percent = share => share === null || share === undefined ? "\u2013" : share > 0 && share < 1e-4 ? "<0.01%" : `${Number((100 * share).toPrecision(2))}%`;
const count = n => n.toLocaleString("en");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const shortened = (text, n) => [...text].length > n ? [...text].slice(0, n - 1).join("") + "\u2026" : text;
const signClass = value => value < 0 ? "n" : "p";

// A column of float32 in base64, as rows of `width`.
function unpacked(text, width) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), view = new DataView(bytes.buffer);
  const values = Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
  return Array.from({ length: values.length / width }, (_, i) => values.subarray(i * width, (i + 1) * width));
}

const rowsOf = columns => {
  const names = Object.keys(columns);
  return Array.from({ length: names.length ? columns[names[0]].length : 0 }, (_, i) =>
    Object.fromEntries(names.map(name => [name, columns[name][i]])));
};

const NODES = [];  // of all graphs; a node's `id` is its place here

const GRAPHS = DATA.graphs.map((given, index) => {
  const graph = { ...given, index, first: NODES.length };
  graph.nodes = rowsOf(given.nodes).map((node, i) => ({
    ...node, graph, id: graph.first + i, order: i, in: [], out: [], name: node.node,
    of: node.kind === "unit" ? `${node.site}/${node.unit}` : null,
  }));
  NODES.push(...graph.nodes);
  graph.size = graph.has_prompt ? "contribution" : "weight";
  graph.edges = rowsOf(given.edges).map((edge, rank) => {
    const made = { ...edge, rank, graph, source: graph.nodes[edge.source], target: graph.nodes[edge.target] };
    made.value = made[graph.size] ?? 0;
    made.source.out.push(made);
    made.target.in.push(made);
    return made;
  });
  graph.strongest = Math.max(1e-30, ...graph.edges.map(edge => edge.strength ?? 0));
  // Cumulative share of influence, the strongest node first: the slider hides what lies above its threshold.
  const ranked = [...graph.nodes].sort((a, b) => (b.influence ?? 0) - (a.influence ?? 0));
  const total = ranked.reduce((sum, node) => sum + (node.influence ?? 0), 0);
  let reached = 0;
  for (const node of ranked) { node.before = total ? reached / total : 0; reached += node.influence ?? 0; }
  if (given.replays) {
    const { nodes, targets, strengths, effects, changes } = given.replays;
    const flat = unpacked(changes, targets.length);
    graph.replays = {
      strengths, rowOf: new Map(nodes.map((node, i) => [graph.nodes[node], i])),
      columnOf: new Map(targets.map((node, i) => [graph.nodes[node], i])),
      effects: unpacked(effects, targets.length),
      changes: nodes.map((_, i) => flat.slice(i * strengths.length, (i + 1) * strengths.length)),
    };
  }
  if (given.attention) {
    graph.attention = {
      heads: rowsOf(given.attention.heads).map(row => ({ ...row, source: graph.nodes[row.source], target: graph.nodes[row.target] })),
      scores: rowsOf(given.attention.scores),
    };
  }
  return graph;
});

const SITE_WORDS = {
  attn_q: "q", attn_k: "k", attn_v: "v", attn_qkv: "qkv", attn_o: "attn out", mlp_in: "mlp in", mlp_gate: "gate", mlp_out: "mlp out",
};
const kindOf = node => node.site.split(".").slice(2).join(".");
const siteWords = node => node.kind === "token" ? "tokens" : node.kind === "logit" ? "answers"
  : `${node.layer} \u00b7 ${SITE_WORDS[kindOf(node)] ?? kindOf(node)}`;

// What a node is called: the label typed here or brought along, else the token, else what the unit promotes, else its number.
function titleOf(node) {
  if (node.kind !== "unit") return node.text || node.name;
  return labelOf(node.of) || promotedBy(node.of) || `unit ${node.unit}`;
}
const labelOf = unit => (STATE.labels[unit] ?? DATA.units[unit] ?? {}).label ?? "";
function promotedBy(unit) {
  const known = DATA.units[unit] ?? {};
  return known.promoted && known.promoted.length ? known.promoted.slice(0, 3).map(pair => pair[0]).join(" ") : "";
}
const tokenAt = (graph, position) => graph.tokens[position] ?? "";
function placeOf(node) {
  const at = node.position === null || !node.graph.tokens.length ? "" : ` at ${tokenAt(node.graph, node.position)} (${node.position})`;
  if (node.kind === "token") return `token ${node.position}`;
  if (node.kind === "logit") return node.probability === null ? "logit" : `answer, p = ${percent(node.probability)}`;
  return `${node.of}${at}`;
}
// In a line, for those who hear it.
const described = node => [titleOf(node), placeOf(node),
  node.activation === null ? null : `${node.kind === "logit" ? "logit" : "z"} ${number(node.activation)}`,
  isPinned(node) ? "pinned" : null].filter(Boolean).join(", ");
