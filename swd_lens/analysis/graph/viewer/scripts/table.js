// The same as tables: nodes and edges that are drawn now, to sort and to search; what screen readers read.

const SORTED = { nodes: ["influence", -1], edges: ["strength", -1] };
const MOST_ROWS = 600;
let ALL_ROWS = false;

const NODE_COLUMNS = [
  ["pin", node => isPinned(node), node => make("input", { type: "checkbox", "aria-label": `pin ${described(node)}`, checked: isPinned(node), "data-key": `pin-${node.id}`, onchange: () => togglePin(node) })],
  ["node", node => titleOf(node), node => nodeLink(node)],
  ["place", node => (node.position ?? 0) * 1e4 + rowOf(node), node => siteWords(node)],
  ["label", node => node.of ? labelOf(node.of) : ""],
  ["activation", node => node.kind === "token" ? null : node.activation], ["drawn edges", node => sumsOf(node)?.[0]], ["edges not drawn", node => sumsOf(node)?.[1]], ["rest", node => sumsOf(node)?.[2]],
  ["influence", node => node.influence, node => percent(node.influence)],
  ["predicted \u0394", node => changeOfNode(node)],
];
const EDGE_COLUMNS = [
  ["from", edge => titleOf(edge.source), edge => nodeLink(edge.source)], ["to", edge => titleOf(edge.target), edge => nodeLink(edge.target)],
  ["kind", edge => edge.kind], ["contribution", edge => edge.contribution], ["weight", edge => edge.weight], ["strength", edge => edge.strength],
  ["varies", edge => edge.varies ?? null, edge => percent(edge.varies)],
];
function sumsOf(node) {
  if (node.kind === "token" || node.rest === null) return null;
  return sums({ nodes: [node] }, SCENES.find(scene => scene.graph === node.graph).drawn);
}

function drawTables() {
  const section = byId("tables");
  if (STATE.view !== "table") { section.replaceChildren(); return; }
  const active = document.activeElement, again = section.contains(active) && active.dataset.key;
  section.replaceChildren(...SCENES.flatMap(scene => {
    const name = SCENES.length > 1 ? ` of graph ${scene.graph.index + 1}` : "";
    const nodes = scene.items.flatMap(item => item.nodes).filter(node => matches(node));
    const edges = [...scene.drawn].filter(edge => matches(edge.source) || matches(edge.target));
    const used = columns => columns.filter(([, value], i) => i < 2 || [...(columns === NODE_COLUMNS ? nodes : edges)].some(row => { const v = value(row); return v !== null && v !== undefined && v !== "" && v !== false; }));
    const drawn = countsOf(scene), caption = (found, all, word) => SEARCH ? `${count(found)} of ${plural(all, word)}${name} match` : `${plural(all, word)}${name}`;
    return [table("nodes", caption(nodes.length, drawn.nodes, "node"), used(NODE_COLUMNS), nodes), table("edges", caption(edges.length, drawn.edges, "edge"), used(EDGE_COLUMNS), edges)];
  }));
  if (again) section.querySelector(`[data-key="${CSS.escape(again)}"]`)?.focus();
}

function table(key, caption, columns, rows) {
  const [by, way] = SORTED[key], value = columns.find(([name]) => name === by)?.[1] ?? columns[0][1];
  const sorted = [...rows].sort((a, b) => {
    const [p, q] = [value(a), value(b)];
    if (p === null || p === undefined || q === null || q === undefined) return (p === null || p === undefined) - (q === null || q === undefined);
    return way * (typeof p === "string" ? p.localeCompare(q) : (Math.abs(p) - Math.abs(q)) || p - q);
  });
  const shown = ALL_ROWS ? sorted : sorted.slice(0, MOST_ROWS);
  const numeric = columns.map(([, cell]) => shown.some(row => typeof cell(row) === "number") && shown.every(row => typeof cell(row) !== "string"));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, make("table", { class: "wide" }, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, columns.map(([name], i) => make("th", { scope: "col", class: numeric[i] && name !== "place" ? "num" : null, "aria-sort": name === by ? (way < 0 ? "descending" : "ascending") : null },
      make("button", { type: "button", class: "sort", "data-key": `sort-${key}-${name}`, onclick: () => { SORTED[key] = [name, name === by ? -way : -1]; changed(false); } }, name, name === by ? (way < 0 ? " \u2193" : " \u2191") : ""))))),
    make("tbody", {}, shown.map(row => make("tr", { class: row === STATE.selected ? "selected" : null }, columns.map(([name, cell, shownAs], i) => {
      const content = shownAs ? shownAs(row) : cell(row);
      const head = name === "node" || name === "from";
      return make(head ? "th" : "td", { scope: head ? "row" : null, class: numeric[i] && name !== "place" ? "num" : null }, typeof content === "number" ? number(content) : content ?? "\u2013");
    }))))),
  shown.length < sorted.length ? make("p", {}, make("button", { type: "button", "data-key": "all-rows", onclick: () => { ALL_ROWS = true; changed(false); } }, `Show all ${count(sorted.length)}`)) : "");
}
