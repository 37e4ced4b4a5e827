// Where boxes stand: rows are tokens, every site that has nodes in execution order, answers on top; columns are positions of tokens.

const BOX = { width: 104, height: 40, gap: 10, row: 46, line: 8, between: 18 }, MORE_ROW = 60;
const IN_LINE = [3, 9];  // fewer side by side, and all edges would run over each other

// What is drawn as one box: a node, or a closed group of nodes.
function itemsOf(graph, shown) {
  const items = [], taken = new Set();
  for (const group of STATE.groups) {
    const members = group.members.filter(node => node.graph === graph && shown.has(node));
    if (!members.length || group.open) continue;
    members.forEach(node => taken.add(node));
    const lead = members.reduce((a, b) => (b.influence ?? 0) > (a.influence ?? 0) ? b : a);
    items.push({ group, nodes: members, lead });
  }
  for (const node of graph.nodes) if (shown.has(node) && !taken.has(node)) items.push({ group: null, nodes: [node], lead: node });
  return items;
}

// Nodes and edges that the sliders leave. The edges are sorted, strongest first; pinned and clamped nodes always stay.
function visible(graph) {
  const kept = node => isPinned(node) || STATE.clamps.has(node) || node === STATE.selected;
  const wanted = node => kept(node) || STATE.influence >= 1 || node.before < STATE.influence || node.kind === "logit";
  const n = STATE.edges ?? graph.edges.length;
  const only = STATE.only === "pinned" ? new Set([...graph.nodes].filter(node => isPinned(node) || node.kind === "logit")) : null;
  const edges = [], nodes = new Set();
  graph.edges.forEach((edge, rank) => {
    if (only && !(only.has(edge.source) && only.has(edge.target))) return;
    if (!wanted(edge.source) || !wanted(edge.target)) return;
    if (rank >= n && !only) return;
    edges.push(edge);
    nodes.add(edge.source).add(edge.target);
  });
  for (const node of graph.nodes) {
    const isolated = !node.in.length && !node.out.length && wanted(node);
    if (only ? only.has(node) : isolated || kept(node) || node.kind === "logit") nodes.add(node);
  }
  return { nodes, edges };
}

// Edges between boxes: those of a group are summed; parts keeps what they are made of.
function links(items, edges) {
  const itemOf = new Map();
  items.forEach(item => item.nodes.forEach(node => itemOf.set(node, item)));
  const found = new Map();
  for (const edge of edges) {
    const source = itemOf.get(edge.source), target = itemOf.get(edge.target);
    if (!source || !target || source === target) continue;
    if (!found.has(source)) found.set(source, new Map());
    const of = found.get(source), attention = edge.kind === "attention";
    const link = of.get(target) ?? { source, target, parts: [], value: 0, strength: 0, attention };
    of.set(target, link);
    link.parts.push(edge);
    link.value += edge.value;
    link.strength += edge.strength ?? 0;
    link.attention = link.attention && attention;
  }
  return [...found.values()].flatMap(of => [...of.values()]).sort((a, b) => a.strength - b.strength);
}

const rowOf = node => node.kind === "token" ? -1 : node.kind === "logit" ? 1e6 : node.row;

// Puts x and y (the middle of its top) on every item; returns the rows and columns with their places. Boxes of one row and column
// stand in lines, as many side by side as makes the whole fit best into a room (width, height).
function place(graph, items, links, room) {
  const last = Math.max(0, ...graph.nodes.map(node => node.position ?? 0));
  const cells = new Map(), columnsUsed = new Set(), rowsUsed = new Set();
  for (const item of items) {
    item.row = rowOf(item.lead);
    item.column = item.lead.kind === "logit" ? last : item.lead.position ?? 0;
    rowsUsed.add(item.row);
    columnsUsed.add(item.column);
    const key = `${item.row}/${item.column}`;
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(item);
  }
  order(cells, links);
  const rows = [...rowsUsed].sort((a, b) => b - a), columns = [...columnsUsed].sort((a, b) => a - b);
  const { inLine, rowGap } = bestLines(cells, rows, columns, room);
  const lines = of => Math.ceil(of.length / inLine), across = of => Math.ceil(of.length / lines(of));
  const rowPlaces = new Map(), columnPlaces = new Map();
  let y = 0;
  for (const row of rows) {
    const most = Math.max(...columns.map(column => cells.has(`${row}/${column}`) ? lines(cells.get(`${row}/${column}`)) : 0));
    const height = most * BOX.height + (most - 1) * BOX.line;
    rowPlaces.set(row, { y, height, node: items.find(item => item.row === row).lead });
    y += height + rowGap;
  }
  let x = 0;
  for (const column of columns) {
    const most = Math.max(1, ...rows.map(row => cells.has(`${row}/${column}`) ? across(cells.get(`${row}/${column}`)) : 0));
    const width = most * BOX.width + (most - 1) * BOX.gap;
    columnPlaces.set(column, { x, width });
    x += width + BOX.between;
  }
  for (const of of cells.values()) {
    const row = rowPlaces.get(of[0].row), column = columnPlaces.get(of[0].column), per = across(of);
    of.forEach((item, i) => {
      const line = Math.floor(i / per), beside = Math.min(per, of.length - line * per);
      const offset = (i - line * per - (beside - 1) / 2) * (BOX.width + BOX.gap);
      item.home = [column.x + column.width / 2 + offset, row.y + line * (BOX.height + BOX.line)];
      const [dx, dy] = STATE.moved.get(item.lead) ?? [0, 0];
      [item.x, item.y] = [item.home[0] + dx, item.home[1] + dy];
    });
  }
  return { rows: rowPlaces, columns: columnPlaces, width: Math.max(1, x - BOX.between), height: Math.max(1, y - rowGap) };
}

// How many stand in a line, and how far apart rows are: further where the whole is wide, so that edges have room.
function bestLines(cells, rows, columns, [wide, high]) {
  const sizeOf = (row, column) => cells.get(`${row}/${column}`)?.length ?? 0;
  let best = { inLine: IN_LINE[0], rowGap: BOX.row }, largest = 0;
  for (let inLine = IN_LINE[0]; inLine <= IN_LINE[1]; inLine++) {
    const across = columns.map(column => Math.max(...rows.map(row => Math.min(inLine, sizeOf(row, column)))));
    const lines = rows.map(row => Math.max(...columns.map(column => Math.ceil(sizeOf(row, column) / inLine))));
    const width = across.reduce((sum, n) => sum + n * (BOX.width + BOX.gap) + BOX.between - BOX.gap, 0);
    const height = lines.reduce((sum, n) => sum + n * (BOX.height + BOX.line) + BOX.row - BOX.line, 0);
    const k = Math.min(wide / width, high / height);
    if (k <= largest * 1.02) continue;
    const spare = (high / k - height) / Math.max(1, rows.length - 1);
    [best, largest] = [{ inLine, rowGap: BOX.row + Math.max(0, Math.min(MORE_ROW, spare)) }, k];
  }
  return best;
}

// Sweeps that put each item at the middle of its neighbours: fewer crossings.
function order(cells, links) {
  const at = new Map(), neighbours = new Map();
  const add = (a, b, w) => { if (!neighbours.has(a)) neighbours.set(a, []); neighbours.get(a).push([b, w]); };
  for (const link of links) { add(link.source, link.target, link.strength); add(link.target, link.source, link.strength); }
  const spread = of => of.forEach((item, i) => at.set(item, item.column + (i + 0.5) / of.length));
  const middle = item => {
    let total = 0, sum = 0;
    for (const [other, w] of neighbours.get(item) ?? []) { total += w; sum += w * at.get(other); }
    return total > 0 ? sum / total : at.get(item);
  };
  const listed = [...cells.values()].sort((a, b) => a[0].row - b[0].row);
  listed.forEach(spread);
  for (let sweep = 0; sweep < 6; sweep++) {
    for (const of of sweep % 2 ? [...listed].reverse() : listed) {
      const middles = new Map(of.map(item => [item, middle(item)]));
      of.sort((a, b) => middles.get(a) - middles.get(b) || a.lead.id - b.lead.id);
      spread(of);
    }
  }
}
