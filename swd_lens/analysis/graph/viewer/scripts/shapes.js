// What a graph is drawn with: lines between boxes, and what stands in a box.

const curve = link => {
  const x0 = link.source.x, y0 = link.source.y, x1 = link.target.x, y1 = link.target.y + BOX.height;
  const bend = Math.max(18, Math.abs(y0 - y1) * 0.42);
  return [x0, y0, x0, y0 - bend, x1, y1 + bend, x1, y1];
};

// Strokes links, those of one look together: orange and solid for positive, blue and dashed for negative, attention in green.
function stroke(context, links, scene, more, spare) {
  const looks = new Map(), { k, x, y } = scene.view;
  for (const link of links) {
    const path = curve(link), top = Math.min(path[1], path[7]) * k + y, bottom = Math.max(path[1], path[7]) * k + y;
    const left = Math.min(path[0], path[6]) * k + x, right = Math.max(path[0], path[6]) * k + x;
    if (bottom < -spare || top > scene.height + spare || right < -spare || left > scene.width + spare) continue;
    const level = Math.round(LEVELS * Math.sqrt(link.strength / scene.strongest));
    const look = (link.attention ? 2 : link.value < 0 ? 1 : 0) + 3 * (link.value < 0) + 6 * level;
    if (!looks.has(look)) looks.set(look, []);
    looks.get(look).push(path);
  }
  for (const [look, paths] of [...looks].sort((a, b) => a[0] - b[0])) {
    const share = Math.floor(look / 6) / LEVELS, width = (0.7 + 3.6 * share) * more;
    context.beginPath();
    for (const [a, b, c, d, e, f, g, h] of paths) { context.moveTo(a, b); context.bezierCurveTo(c, d, e, f, g, h); }
    context.lineWidth = Math.max(width, 0.55 / k);
    // On a dark ground thin lines need more of their colour: a contrast of 4.5 to 1 (tests/analysis/test_viewer_page.py). Where
    // thousands lie over each other, each needs less.
    const dark = links.length > MANY ? DARK_ALPHA / 2 : DARK_ALPHA;
    context.strokeStyle = colour(["plus", "minus", "unsigned"][look % 3], more > 1 ? 1 : DARK.matches ? dark + (1 - dark) * share : 0.22 + 0.6 * share);
    // Dashes of many thin lines cost time and say nothing.
    const dash = Math.floor(look / 3) % 2 && (more > 1 || links.length < MANY || share > 0.3);
    context.setLineDash(dash ? [6, 3.5] : []);
    context.stroke();
  }
}

// Where a curve that begins in the window leaves it, [x, y] on the rim, and at which side.
function leaves([a, b, c, d, e, f, g, h], inside, rim) {
  const at = t => [[a, c, e, g], [b, d, f, h]].map(([p, q, r, s]) => (1 - t) ** 3 * p + 3 * t * (1 - t) ** 2 * q + 3 * t * t * (1 - t) * r + t ** 3 * s);
  let [low, high] = [0, 1];
  for (let t = 1; t <= 24; t++) if (!inside(...at(t / 24))) { [low, high] = [(t - 1) / 24, t / 24]; break; }
  for (let step = 0; step < 6; step++) { const t = (low + high) / 2; if (inside(...at(t))) low = t; else high = t; }
  const [x, y] = at(high), beyond = { left: rim.left - x, right: x - rim.right, top: rim.top - y, bottom: y - rim.bottom };
  const side = Object.keys(beyond).reduce((p, q) => beyond[q] > beyond[p] ? q : p);
  return [[Math.min(rim.right, Math.max(rim.left, x)), Math.min(rim.bottom, Math.max(rim.top, y))], side];
}

// Marks of one side, one after the other with room for their words; where there is none, the marks of fewest edges are left out.
const MARK = { left: 15, right: 15, top: 64, bottom: 64 };
function apart(marks, rim) {
  return ["left", "right", "top", "bottom"].flatMap(side => {
    const axis = side === "left" || side === "right" ? 1 : 0, [from, to] = axis ? [rim.top + 10, rim.bottom - 10] : [rim.left + 30, rim.right - 30];
    const most = Math.max(1, Math.floor((to - from) / MARK[side])), of = marks.filter(mark => mark.side === side).sort((a, b) => b.n - a.n).slice(0, most);
    for (const mark of of) mark.at = mark.at.map(sum => sum / mark.links);
    of.sort((a, b) => a.at[axis] - b.at[axis]);
    let next = from;
    for (const mark of of) { mark.at[axis] = Math.max(next, Math.min(mark.at[axis], to)); next = mark.at[axis] + MARK[side]; }
    let last = to;
    for (const mark of [...of].reverse()) { mark.at[axis] = Math.min(mark.at[axis], last); last = mark.at[axis] - MARK[side]; }
    return of;
  });
}
const ARROWS = { left: "M2 0l7 -4.5v9z", right: "M-2 0l-7 -4.5v9z", top: "M0 2l-4.5 7h9z", bottom: "M0 -2l-4.5 -7h9z" };
function leavingMark({ side, at, n, token }) {
  const across = side === "left" || side === "right", words = [shortened(token, 9), n > 1 ? String(n) : ""].filter(Boolean).join(" ");
  return make("g", { transform: `translate(${at[0].toFixed(1)} ${at[1].toFixed(1)})`, "data-leaving": `${side} ${n}` },
    make("title", {}, `${plural(n, "attention edge")} ${n === 1 ? "goes" : "go"} on outside the window, at ${token}`),
    make("path", { d: ARROWS[side] }),
    make("text", { x: side === "left" ? 12 : side === "right" ? -12 : 0, y: across ? 3.5 : side === "top" ? 20 : -12, "text-anchor": side === "left" ? "start" : side === "right" ? "end" : "middle" }, words));
}

const DARK_ALPHA = 0.72, MANY = 1200;  // strength of the weakest line's colour; links
const DARK = matchMedia("(prefers-color-scheme: dark)");
let COLOURS = {};
function colour(name, alpha) {
  COLOURS[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return `rgba(${COLOURS[name]}, ${alpha.toFixed(2)})`;
}

// ---------------------------------------------------------------------------------------------- boxes

// A title, as much of it as a box is wide.
const MEASURE = document.createElement("canvas").getContext("2d"), FITTED = new Map();
function fitting(title, own) {
  const key = `${own} ${title}`;
  if (!FITTED.has(key)) {
    MEASURE.font = `${own ? "italic" : "600"} 11.5px ${getComputedStyle(document.body).fontFamily}`;
    const fits = text => MEASURE.measureText(text).width <= BOX.width - 10, letters = [...title];
    let n = Math.min(letters.length, 40);
    const text = () => n === letters.length ? title : letters.slice(0, n).join("").trimEnd() + "\u2026";
    while (n > 1 && !fits(text())) n--;
    FITTED.set(key, text());
  }
  return FITTED.get(key);
}

const graphTitle = graph => graph.prompt ? `Unit graph of \u201c${graph.prompt}\u201d` : "Unit graph of weights";
function promptLine(graph) {
  if (!graph.tokens.length) return graph.prompt ?? "no prompt: weights between units";
  return graph.tokens.map((token, i) => make("span", { class: "token", title: `position ${i}` }, token));
}

function subtitle(item, change) {
  if (change !== null) return `\u0394 ${number(change)}`;
  if (item.group) return plural(item.nodes.length, "node");
  const node = item.lead;
  if (node.kind === "token") return `position ${node.position}`;
  if (node.kind === "logit") return [node.probability === null ? null : `p ${percent(node.probability)}`, number(node.activation)].filter(Boolean).join(" \u00b7 ");
  return node.activation === null ? `#${node.unit}` : `#${node.unit} \u00b7 ${number(node.activation)}`;
}

// What a box's activation is made of: edges drawn now, edges not drawn, and the rest that no edge explains. For a group the sums.
function sums(item, shown) {
  let [drawn, activation, rest] = [0, 0, 0];
  for (const node of item.nodes) {
    if (node.kind === "token" || node.activation === null || node.rest === null) continue;
    activation += node.activation;
    rest += node.rest;
    for (const edge of node.in) if (shown.has(edge)) drawn += edge.contribution ?? 0;
  }
  return [drawn, activation - rest - drawn, rest];
}

function restBar(item, shown, index) {
  const parts = sums(item, shown), total = parts.reduce((sum, part) => sum + Math.abs(part), 0);
  if (!total) return "";
  let x = 7;
  return make("g", { class: "sums" }, ["drawn", "hidden-part", "rest"].map((name, i) => {
    const width = Math.abs(parts[i]) / total * (BOX.width - 14), bar = make("rect", { class: name, x, y: BOX.height - 7.5, width, height: 4.5 });
    if (name === "rest") bar.setAttribute("fill", `url(#hatch-${index})`);
    x += width;
    return bar;
  }));
}
function hatching(index) {
  const svg = name => document.createElementNS("http://www.w3.org/2000/svg", name);
  const defs = svg("defs"), pattern = svg("pattern");
  for (const [key, value] of Object.entries({ id: `hatch-${index}`, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" })) pattern.setAttribute(key, value);
  pattern.append(make("line", { class: "hatch", x1: 0, x2: 0, y1: 0, y2: 4 }));
  defs.append(pattern);
  return defs;
}
