// An edge in the panel: its numbers; of an edge through attention the heads that carry it, and of a head's score the query-key pairs.

let OPEN_HEAD = null;  // the row of heads whose score is shown
const hasPaths = link => link.parts.some(edge => headsOf(edge).length);
const headsOf = edge => (edge.graph.attention?.heads ?? []).filter(row => row.source === edge.source && row.target === edge.target);

function linkPanel(link) {
  const edges = [...link.parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  return [make("section", {}, make("h2", {}, nameOfItem(link.source), " \u2192 ", nameOfItem(link.target)),
    make("p", { class: "soft" }, `${sizeWord(edges[0].graph)} `, make("b", { class: `value ${signClass(link.value)}` }, number(link.value)), `, ${kindsOf(link)}${edges.length > 1 ? `, ${plural(edges.length, "edge")}` : ""}`),
    ...variesLine(edges),
    make("ul", { class: "plain" }, [...new Set(edges.flatMap(edge => [edge.source, edge.target]))].slice(0, 12).map(node => make("li", {}, nodeLink(node)))),
    edges.length > 1 ? make("ol", { class: "edges" }, edges.slice(0, 30).map(edge => make("li", {},
      make("button", { type: "button", class: "link", "data-key": `edge-${edge.rank}`, onclick: () => selectLink(linkOf(edge)) }, `${titleOf(edge.source)} \u2192 ${titleOf(edge.target)}`), make("span", { class: "num" }, number(edge.value))))) : "",
  ), ...edges.filter(edge => headsOf(edge).length).slice(0, 6).map(headTable)];
}

function headTable(edge) {
  const graph = edge.graph, heads = [...headsOf(edge)].sort((a, b) => Math.abs(b.contribution) - Math.abs(a.contribution));
  const most = Math.max(...heads.map(row => Math.abs(row.contribution)), 1e-30);
  return make("section", { class: "heads" }, make("h3", {}, "Heads that carry it"),
    make("p", { class: "soft" }, `from ${tokenAt(graph, heads[0].src)} (${heads[0].src}) to ${tokenAt(graph, heads[0].dest)} (${heads[0].dest}); together ${number(heads.reduce((sum, row) => sum + row.contribution, 0))}`),
    make("ol", { class: "edges" }, heads.map(row => make("li", {},
      make("i", { class: "a", style: `width:${(100 * Math.abs(row.contribution) / most).toFixed(1)}%` }),
      make("button", { type: "button", class: "link", "data-key": `head-${row.layer}-${row.head}`, "aria-expanded": String(sameHead(row, OPEN_HEAD)), onclick: () => { OPEN_HEAD = sameHead(row, OPEN_HEAD) ? null : row; changed(false); } },
        `L${row.layer}H${row.head}`, make("span", { class: "soft" }, ` pattern ${percent(row.pattern)}`)),
      make("span", { class: "num" }, number(row.contribution))))),
    ...heads.filter(row => sameHead(row, OPEN_HEAD)).map(row => scoreTable(graph, row)));
}
const sameHead = (a, b) => a && b && ["layer", "head", "dest", "src"].every(key => a[key] === b[key]);

function scoreTable(graph, head) {
  const rows = graph.attention.scores.filter(row => sameHead(row, head)), total = rows.reduce((sum, row) => sum + row.contribution, 0);
  const most = Math.max(...rows.map(row => Math.abs(row.contribution)), 1e-30);
  const unit = name => {
    if (!name) return "";
    const drawn = graph.nodes.find(node => node.of === name);
    const label = labelOf(name) || promotedBy(name);
    return drawn ? nodeLink(drawn) : make("span", { class: "wrap" }, label ? `${label} ` : "", make("span", { class: "soft" }, name));
  };
  return make("table", { class: "pairs" },
    make("caption", {}, `Why L${head.layer}H${head.head} looks there: its score before the softmax is ${number(total)}`),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "query unit"), make("th", { scope: "col" }, "key unit"), make("th", { scope: "col", class: "num" }, "score"))),
    make("tbody", {}, rows.map(row => make("tr", {},
      row.part === "pair" ? [make("td", {}, unit(row["q unit"])), make("td", {}, unit(row["k unit"]))] : make("td", { colspan: 2 }, make("span", { class: "soft" }, row.part), " ", unit(row["q unit"] ?? row["k unit"])),
      make("td", { class: "num bar" }, make("i", { class: signClass(row.contribution), style: `width:${(100 * Math.abs(row.contribution) / most).toFixed(1)}%` }), number(row.contribution))))));
}
