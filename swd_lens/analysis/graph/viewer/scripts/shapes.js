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
    // On a dark ground thin lines need more of their colour.
    context.strokeStyle = colour(["plus", "minus", "unsigned"][look % 3], more > 1 ? 1 : DARK.matches ? 0.42 + 0.5 * share : 0.22 + 0.6 * share);
    // Dashes of many thin lines cost time and say nothing.
    const dash = Math.floor(look / 3) % 2 && (more > 1 || links.length < 1200 || share > 0.3);
    context.setLineDash(dash ? [6, 3.5] : []);
    context.stroke();
  }
}

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
