// A graph on the screen: boxes as SVG, edges on two canvases below them (all of them; those of the box at hand), names of rows and
// columns at the edges of the window, whatever part of the graph is in it.

const MARGIN = { left: 96, top: 14, right: 14, bottom: 30 }, NARROW = 520;
const LEVELS = 6;  // of an edge's width and strength of colour
const SPARE = 200;  // pixels of edges around the window, so that it can be moved a little before they are drawn again
const PAUSE = 130;  // milliseconds without a movement after which they are
const SCENES = [];

class Scene {
  constructor(graph, host) {
    Object.assign(this, { graph, view: { k: 1, x: 0, y: 0 }, items: [], links: [], boxes: new Map(), hovered: null, held: null, fitted: false });
    this.base = make("canvas", { "aria-hidden": "true" });
    this.over = make("canvas", { "aria-hidden": "true" });
    this.svg = make("svg", { role: "group", "aria-label": `${graphTitle(graph)}: arrow keys go from node to node, Enter pins` });
    this.svg.append(hatching(graph.index));
    this.grid = make("g", { class: "grid", "aria-hidden": "true" });
    this.nodes = make("g", { class: "nodes" });
    this.names = make("g", { class: "names", "aria-hidden": "true" });
    this.leaving = make("g", { class: "leaving", "aria-hidden": "true" });
    this.svg.append(this.grid, this.nodes, this.names, this.leaving);
    this.zoom = make("div", { class: "zoom" },
      make("button", { type: "button", "aria-label": "Zoom in", onclick: () => this.zoomBy(1.25) }, "+"),
      make("button", { type: "button", "aria-label": "Zoom out", onclick: () => this.zoomBy(0.8) }, "\u2212"));
    const caption = GRAPHS.length > 1 ? make("figcaption", {}, promptLine(graph)) : null;
    this.frame = make("div", { class: "frame" }, this.base, this.over, this.svg, this.zoom);
    host.append(make("figure", { class: "scene" }, caption, this.frame));
    new ResizeObserver(() => { this.measure(); if (this.width && !this.fitted) this.fit(); else this.apply(); }).observe(this.frame);
    this.listen();
  }

  measure() {
    [this.width, this.height] = [this.frame.clientWidth, this.frame.clientHeight];
    if (this === SCENES[0]) MARGIN.left = this.width < NARROW ? 90 : 96;
    this.svg.classList.toggle("narrow", this.width < NARROW);
    this.scale = Math.max(1, window.devicePixelRatio || 1) * (this.printing ? 2 : 1);
    for (const [canvas, spare] of [[this.base, SPARE], [this.over, 0]]) {
      [canvas.width, canvas.height] = [this.width, this.height].map(size => Math.round((size + 2 * spare) * this.scale));
    }
  }

  // Everything again, as the state has it.
  draw() {
    const shown = visible(this.graph);
    this.drawn = new Set(shown.edges);
    this.items = itemsOf(this.graph, shown.nodes);
    this.links = links(this.items, shown.edges);
    this.size = place(this.graph, this.items, this.links, this.room());
    this.strongest = Math.max(1e-30, ...this.links.map(link => link.strength));
    const before = this.boxes, focused = document.activeElement;
    this.boxes = new Map();
    for (const item of this.items) {
      const key = item.group ?? item.lead, box = before.get(key) ?? make("g", { class: "node", role: "button" });
      before.delete(key);
      box.item = item;
      this.boxes.set(key, box);
      this.fill(box, item);
    }
    for (const gone of before.values()) gone.remove();
    // In the order in which they are read: answers first, then down, from left to right.
    const read = [...this.items].sort((a, b) => b.row - a.row || a.home[1] - b.home[1] || a.home[0] - b.home[0]);
    read.forEach((item, i) => {
      const box = this.boxOf(item);
      if (this.nodes.children[i] !== box) this.nodes.insertBefore(box, this.nodes.children[i] ?? null);
    });
    if (focused && focused.item && focused.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
    const reachable = this.itemAt(STATE.selected) ?? read[0];
    for (const item of this.items) this.boxOf(item).setAttribute("tabindex", item === reachable ? 0 : -1);
    this.apply();
  }

  boxOf(item) { return this.boxes.get(item.group ?? item.lead); }
  itemAt(node) { return node ? this.items.find(item => item.nodes.includes(node)) : undefined; }

  fill(box, item) {
    const node = item.lead, change = changeOf(item);
    const classes = ["node", item.group ? "group" : node.kind];
    if (item.nodes.some(isPinned)) classes.push("pinned");
    if (item.nodes.includes(STATE.selected)) classes.push("selected");
    if (item.nodes.some(n => STATE.marked.has(n))) classes.push("marked");
    if (item.nodes.some(n => STATE.clamps.has(n))) classes.push("clamped");
    const title = item.group ? item.group.name : titleOf(node), own = !item.group && node.kind === "unit" && !labelOf(node.of);
    const text = [title, own, subtitle(item, change), classes.join(" ")].join("\n") + sums(item, this.drawn).join() + (change ?? "");
    box.setAttribute("transform", `translate(${item.x - BOX.width / 2} ${item.y})`);
    if (box.text === text) return;
    box.text = text;
    box.setAttribute("class", classes.join(" "));
    box.setAttribute("aria-label", item.group ? `group ${title}, ${plural(item.nodes.length, "node")}` : described(node));
    box.setAttribute("aria-pressed", item.nodes.some(isPinned));
    box.setAttribute("data-node", item.nodes.map(n => n.name.replaceAll(" ", "_")).join(" "));
    box.setAttribute("data-sums", JSON.stringify(sums(item, this.drawn)));
    if (change === null) box.removeAttribute("data-change"); else box.setAttribute("data-change", change);
    const tint = change === null ? 0 : Math.min(1, Math.abs(change) / largestChange(this.graph, node.kind)) ** 0.6;
    box.replaceChildren(
      item.group ? make("rect", { class: "behind", x: 3, y: -4, width: BOX.width - 6, height: BOX.height, rx: 7 }) : "",
      make("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 7 }),
      tint ? make("rect", { class: `tint ${signClass(change)}`, width: BOX.width, height: BOX.height, rx: 7, style: `--s:${tint.toFixed(3)}` }) : "",
      make("text", { class: own ? "name own" : "name", x: BOX.width / 2, y: 15 }, fitting(title, own)),
      make("text", { class: "sub", x: BOX.width / 2, y: 28 }, subtitle(item, change)),
      restBar(item, this.drawn, this.graph.index),
      classes.includes("pinned") ? make("path", { class: "pin", d: "M0 0h12l-12 12z", transform: "translate(3 3)" }) : "",
    );
  }

  // ---------------------------------------------------------------------------------------- what part is in the window

  room() {
    return [(this.width || 1000) - MARGIN.left - MARGIN.right, (this.height || 700) - MARGIN.top - MARGIN.bottom];
  }

  // The whole graph, as the page opens: what is small is read by zooming in, and nothing is missed.
  fit() {
    if (!this.width || !this.size) return;
    const room = this.room();
    const k = Math.min(room[0] / (this.size.width + 8), room[1] / (this.size.height + 8), 1.3);
    const [x, y] = [room[0] - this.size.width * k, room[1] - this.size.height * k];
    this.fitted = true;
    this.view = { k, x: MARGIN.left + Math.max(0, x / 2), y: MARGIN.top + Math.max(0, y / 2) };
    this.apply();
  }

  zoomBy(factor, at = [this.width / 2, this.height / 2]) {
    const k = Math.min(4, Math.max(0.08, this.view.k * factor)), r = k / this.view.k;
    this.view = { k, x: at[0] - (at[0] - this.view.x) * r, y: at[1] - (at[1] - this.view.y) * r };
    this.apply(true);
  }

  // Moves the window so that an item can be seen.
  reveal(item) {
    const { k } = this.view, half = BOX.width * k / 2, x = item.x * k + this.view.x, y = item.y * k + this.view.y;
    const left = MARGIN.left + half, right = this.width - MARGIN.right - half, bottom = this.height - MARGIN.bottom - BOX.height * k;
    this.view.x += x < left ? left - x : x > right ? right - x : 0;
    this.view.y += y < MARGIN.top ? MARGIN.top - y : y > bottom ? bottom - y : 0;
    this.apply();
  }

  // While the window moves, the edges' canvas is moved as a picture; thousands of them are drawn again when it stands.
  apply(moving = false) {
    if (!this.width || !this.size) return;
    const { k, x, y } = this.view;
    this.nodes.setAttribute("transform", `translate(${x} ${y}) scale(${k})`);
    this.svg.classList.toggle("far", k < 0.55);
    this.svg.classList.toggle("tiny", k < 0.33);
    this.drawNames();
    this.drawLeaving();
    clearTimeout(this.standing);
    if (moving && this.painted) {
      const s = k / this.painted.k, offset = (now, then) => now + SPARE - s * (then + SPARE);
      this.base.style.transform = `translate(${offset(x, this.painted.x)}px, ${offset(y, this.painted.y)}px) scale(${s})`;
      this.standing = setTimeout(() => this.paint(), PAUSE);
    } else this.paint();
    this.paintOver();
  }

  drawNames() {
    const { k, x, y } = this.view, lines = [], names = [];
    names.push(make("rect", { class: "margin", x: 0, y: 0, width: MARGIN.left - 8, height: this.height }));
    let above = -100;
    for (const row of this.size.rows.values()) {
      const top = row.y * k + y, middle = top + row.height * k / 2;
      if (middle < 0 || middle > this.height - MARGIN.bottom + 8) continue;
      lines.push(make("line", { x1: MARGIN.left - 8, x2: this.width, y1: middle, y2: middle }));
      if (middle - above < 13) continue;
      above = middle;
      names.push(make("text", { x: MARGIN.left - 16, y: middle + 4, "text-anchor": "end" }, siteWords(row.node)));
    }
    names.push(make("rect", { class: "margin", x: 0, y: this.height - MARGIN.bottom + 4, width: this.width, height: MARGIN.bottom }));
    const columns = [...this.size.columns];
    columns.forEach(([position, column], i) => {
      const middle = (column.x + column.width / 2) * k + x, left = (column.x - BOX.between / 2) * k + x;
      if (i && left > MARGIN.left) lines.push(make("line", { class: "column", x1: left, x2: left, y1: 0, y2: this.height - MARGIN.bottom + 4 }));
      if (middle < MARGIN.left - 8 || middle > this.width || !this.graph.tokens.length || column.width * k < 26) return;
      const room = Math.max(4, Math.floor(column.width * k / 7));
      names.push(make("text", { x: middle, y: this.height - 9, "text-anchor": "middle" },
        make("tspan", {}, shortened(tokenAt(this.graph, position), room)), room > 8 ? make("tspan", { class: "soft" }, ` ${position}`) : ""));
    });
    this.grid.replaceChildren(...lines);
    this.names.replaceChildren(...names);
  }

  // Where attention edges leave the window: an arrow on its rim, with the token that they go on to, or come from, and how many.
  drawLeaving() {
    const { k, x, y } = this.view, rim = { left: MARGIN.left - 8, top: 0, right: this.width, bottom: this.height - MARGIN.bottom + 4 };
    const inside = (a, b) => a >= rim.left && a <= rim.right && b >= rim.top && b <= rim.bottom;
    const found = new Map();
    for (const link of this.links) {
      if (!link.parts.some(edge => edge.kind === "attention")) continue;
      const path = curve(link).map((value, i) => value * k + (i % 2 ? y : x));
      const seen = [inside(path[0], path[1]), inside(path[6], path[7])];
      if (seen[0] === seen[1]) continue;
      const [at, side] = leaves(seen[0] ? path : [6, 7, 4, 5, 2, 3, 0, 1].map(i => path[i]), inside, rim);
      const other = (seen[0] ? link.target : link.source).lead, key = `${side}/${other.position}`;
      const mark = found.get(key) ?? { side, at: [0, 0], n: 0, links: 0, token: tokenAt(this.graph, other.position ?? 0) };
      found.set(key, mark);
      mark.at = mark.at.map((sum, i) => sum + at[i]);
      mark.links += 1;
      mark.n += link.parts.filter(edge => edge.kind === "attention").length;
    }
    this.leaving.replaceChildren(...apart([...found.values()], rim).map(mark => leavingMark(mark)));
  }

  // ---------------------------------------------------------------------------------------- edges

  context(canvas, spare) {
    const context = canvas.getContext("2d"), { k, x, y } = this.view;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.setTransform(this.scale * k, 0, 0, this.scale * k, this.scale * (x + spare), this.scale * (y + spare));
    return context;
  }

  paint() {
    stroke(this.context(this.base, SPARE), this.links, this, 1, SPARE);
    this.painted = { ...this.view };
    this.base.style.transform = "";
  }

  // The links of the box under the pointer, held, or selected.
  focus() {
    if (this.held) return [this.held];
    if (this.hovered) return [this.hovered];
    const items = this.items.filter(item => item.nodes.includes(STATE.selected) || item.nodes.some(node => STATE.marked.has(node)));
    return items;
  }

  paintOver() {
    const focus = this.focus(), context = this.context(this.over, 0);
    const near = focus.length ? this.links.filter(link => focus.includes(link.source) || focus.includes(link.target)) : [];
    const chosen = SELECTED_LINK && this.links.find(link => link.parts.includes(SELECTED_LINK.parts[0]));
    const lines = [...new Set([...near, this.link, chosen].filter(Boolean))];
    stroke(context, lines, this, 1.25, 0);
    this.base.classList.toggle("faded", Boolean(this.hovered || this.held));
    this.base.classList.toggle("dimmed", !this.hovered && (focus.length > 0 || Boolean(chosen)));
    // The rest steps back while something is pointed at; what is selected leaves the others to be read.
    if (this.held) return;
    this.svg.classList.toggle("focused", Boolean(this.hovered) && !predicted(this.graph).changes);
    const lit = new Set(focus);
    [...near, ...(chosen ? [chosen] : [])].forEach(link => lit.add(link.source).add(link.target));
    const unit = HOVERED_UNIT;
    for (const item of this.items) {
      const box = this.boxOf(item);
      box.classList.toggle("lit", lit.has(item));
      box.classList.toggle("twin", Boolean(unit) && !this.hovered && item.nodes.some(node => node.of === unit));
    }
  }

  repaint() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paintOver(); });
  }
}

let HOVERED_UNIT = null;
