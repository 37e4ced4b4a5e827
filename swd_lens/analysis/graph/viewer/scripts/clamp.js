// The live clamp: a unit's z is set to a multiple of what it was, and the change runs through the frozen, linear paths.
//
// 1. With replays the page holds what one unit of z changes at every node, through all paths of the frozen run, drawn or not:
//    effects[clamped][node]. Several clamped units are held at once: their own changes are found so that each ends at its value.
// 2. Without, or when asked for, the change goes along the edges that are drawn now, node by node in the order of execution.
// 3. True replays, where there are any, are forwards of the model; the gap is what norms, patterns and curvature add.

let PREDICTED = null;  // per graph, for the state that is drawn
WATCHERS.unshift(() => { PREDICTED = null; });

const canClamp = node => node.kind === "unit" && node.graph.has_prompt && Boolean(node.activation);
const clampsOf = graph => [...STATE.clamps].filter(([node]) => node.graph === graph);
const wantedChange = ([node, factor]) => (factor - 1) * node.activation;
const hasEffects = (graph, clamps) => Boolean(graph.replays) && clamps.every(([node]) => graph.replays.rowOf.has(node));

function toggleClamp(node) {
  if (!STATE.clamps.delete(node)) STATE.clamps.set(node, 0);
  say(STATE.clamps.has(node) ? `${titleOf(node)} clamped to 0` : `${titleOf(node)} runs free`);
  changed();
}

// Node -> predicted change, by "frozen" (all paths) or "drawn" (the edges drawn now).
function predictionBy(theory, graph, clamps) {
  return theory === "frozen" ? frozenPrediction(graph, clamps) : drawnPrediction(graph, clamps);
}
function frozenPrediction(graph, clamps) {
  const { rowOf, columnOf, effects } = graph.replays, rows = clamps.map(([node]) => effects[rowOf.get(node)]);
  const columns = clamps.map(([node]) => columnOf.get(node));
  const own = solved(columns.map(column => rows.map(row => row[column])), clamps.map(wantedChange));
  return new Map([...columnOf].map(([node, column]) => [node, rows.reduce((sum, row, i) => sum + own[i] * row[column], 0)]));
}
function drawnPrediction(graph, clamps) {
  const drawn = SCENES.find(scene => scene.graph === graph).drawn, held = new Map(clamps.map(clamp => [clamp[0], wantedChange(clamp)]));
  const change = new Map();
  for (const node of graph.nodes) {
    if (node.kind === "token") continue;
    change.set(node, held.get(node) ?? node.in.reduce((sum, edge) => drawn.has(edge) ? sum + edge.weight * (change.get(edge.source) ?? 0) : sum, 0));
  }
  return change;
}
// x with matrix x = wanted, by elimination; a unit that another clamp leaves nothing to do for stays as it is.
function solved(matrix, wanted) {
  const n = wanted.length, rows = matrix.map((row, i) => [...row, wanted[i]]);
  for (let i = 0; i < n; i++) {
    let best = i;
    for (let j = i + 1; j < n; j++) if (Math.abs(rows[j][i]) > Math.abs(rows[best][i])) best = j;
    [rows[i], rows[best]] = [rows[best], rows[i]];
    if (!rows[i][i]) continue;
    for (let j = 0; j < n; j++) {
      const factor = j === i ? 0 : rows[j][i] / rows[i][i];
      if (factor) for (let k = i; k <= n; k++) rows[j][k] -= factor * rows[i][k];
    }
  }
  return rows.map((row, i) => row[i] ? row[n] / row[i] : 0);
}

const theoryOf = (graph, clamps) => hasEffects(graph, clamps) ? STATE.theory : "drawn";
function predicted(graph) {
  PREDICTED ??= new Map();
  if (!PREDICTED.has(graph)) {
    const clamps = clampsOf(graph);
    const changes = clamps.length ? predictionBy(theoryOf(graph, clamps), graph, clamps) : null, largest = {};
    for (const [node, change] of changes ?? []) if (!STATE.clamps.has(node)) largest[node.kind] = Math.max(largest[node.kind] ?? 1e-30, Math.abs(change));
    PREDICTED.set(graph, { changes, largest });
  }
  return PREDICTED.get(graph);
}
const changeOfNode = node => predicted(node.graph).changes?.get(node) ?? null;
function changeOf(item) {
  const changes = item.nodes.map(changeOfNode);
  return changes.every(change => change === null) ? null : changes.reduce((sum, change) => sum + (change ?? 0), 0);
}
const largestChange = (graph, kind) => predicted(graph).largest[kind] ?? 1e-30;

// What a forward of the model changed, where one was made with just these clamps; else null.
function trueChanges(graph, clamps) {
  if (!graph.replays || clamps.length !== 1 || !graph.replays.rowOf.has(clamps[0][0])) return null;
  const { strengths, changes, rowOf, columnOf } = graph.replays, [node, factor] = clamps[0];
  const at = strengths.findIndex(strength => Math.abs(strength - factor) < 1e-6);
  return at < 0 ? null : new Map([...columnOf].map(([target, column]) => [target, changes[rowOf.get(node)][at][column]]));
}

// ---------------------------------------------------------------------------------------------- in the panel

function clampPanel() {
  const graphs = GRAPHS.filter(graph => clampsOf(graph).length);
  if (!graphs.length) return [];
  return [make("section", { class: "clamp" }, make("h2", {}, "Live clamp"),
    ...[...STATE.clamps].map(clampSlider),
    make("div", { id: "clamp-results" }, graphs.map(clampResults)))];
}
function refreshClamp() {
  byId("clamp-results")?.replaceChildren(...GRAPHS.filter(graph => clampsOf(graph).length).flatMap(clampResults));
}

function clampSlider([node, factor]) {
  const strengths = node.graph.replays?.rowOf.has(node) ? node.graph.replays.strengths : [];
  const low = Math.min(0, ...strengths), high = Math.max(2, ...strengths), key = `clamp-${node.id}`;
  const said = make("output", {});
  const tell = value => { said.textContent = `z ${number(value * node.activation)} = ${Number(value.toFixed(2))} \u00d7 ${number(node.activation)}`; };
  const slider = make("input", { type: "range", min: low, max: high, step: 0.01, value: factor, "data-key": key, list: `${key}-marks`, "aria-label": `z of ${titleOf(node)}, as a multiple of what it was`,
    oninput: () => {
      // Near a strength that was replayed it stands on it.
      const near = strengths.find(strength => Math.abs(strength - slider.value) < 0.03);
      if (near !== undefined) slider.value = near;
      STATE.clamps.set(node, Number(slider.value));
      tell(Number(slider.value));
      changed();
    } });
  tell(factor);
  return make("div", { class: "slider" }, make("p", {}, nodeLink(node), make("button", { type: "button", class: "chip", "data-key": `free-${node.id}`, onclick: () => toggleClamp(node) }, "Let go")),
    slider, make("datalist", { id: `${key}-marks` }, strengths.map(strength => make("option", { value: strength }))), said);
}

function clampResults(graph) {
  const clamps = clampsOf(graph), known = hasEffects(graph, clamps), theory = theoryOf(graph, clamps), truth = trueChanges(graph, clamps);
  const changes = predicted(graph).changes, answers = graph.nodes.filter(node => node.kind === "logit");
  const clamped = new Set(clamps.map(([node]) => node));
  const moved = [...changes].filter(([node, change]) => node.kind === "unit" && !clamped.has(node) && Math.abs(change) > 1e-7).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 8).map(([node]) => node);
  return [
    known ? make("p", { class: "switch small", role: "group", "aria-label": "Paths that the change takes" },
      ["frozen", "drawn"].map(name => make("button", { type: "button", "data-key": `theory-${name}`, "aria-pressed": String(theory === name), onclick: () => { STATE.theory = name; changed(); } }, name === "frozen" ? "All frozen paths" : "Drawn edges only")))
      : make("p", { class: "soft" }, "Along the drawn edges alone: this page was made without replays, which hold all paths and true runs."),
    clamps.length === 1 && known && answers.length ? clampCharts(graph, clamps[0], answers, theory) : "",
    make("table", { class: "changes" }, make("caption", {}, truth ? "Predicted and true changes" : "Predicted changes"),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, ""), make("th", { scope: "col", class: "num" }, "predicted"), truth ? [make("th", { scope: "col", class: "num" }, "true"), make("th", { scope: "col", class: "num" }, "gap")] : "")),
      make("tbody", {}, [...answers, ...moved].map(node => make("tr", {}, make("th", { scope: "row" }, nodeLink(node)),
        make("td", { class: `num ${signClass(changes.get(node))}` }, number(changes.get(node))),
        truth ? [make("td", { class: "num" }, number(truth.get(node))), make("td", { class: "num soft" }, number(truth.get(node) - changes.get(node)))] : "")))),
    known && !truth ? make("p", { class: "soft" }, clamps.length > 1 ? "True runs were made with one unit clamped at a time." : `True runs were made at ${graph.replays.strengths.map(s => `${s} \u00d7 z`).join(", ")}: move the slider onto one.`) : "",
  ];
}

// One chart per answer, and of the first two answers' difference: the prediction as a line, true runs as points, the gap between.
function clampCharts(graph, [node, factor], answers, theory) {
  const { strengths, changes, rowOf, columnOf } = graph.replays, row = rowOf.get(node);
  const perUnit = predictionBy(theory, graph, [[node, 2]]);  // at twice z: the change by one more z
  const series = answers.slice(0, 4).map(answer => ({ name: titleOf(answer), slope: perUnit.get(answer), truth: strengths.map((_, i) => changes[row][i][columnOf.get(answer)]) }));
  if (answers.length > 1) series.unshift({ name: `${titleOf(answers[0])} \u2212 ${titleOf(answers[1])}`, slope: series[0].slope - series[1].slope, truth: series[0].truth.map((value, i) => value - series[1].truth[i]) });
  const low = Math.min(0, ...strengths), high = Math.max(2, ...strengths);
  const W = 160, H = 92, pad = { left: 42, right: 10, top: 8, bottom: 16 };
  const extent = Math.max(1e-6, ...series.flatMap(s => [Math.abs(s.slope * (low - 1)), Math.abs(s.slope * (high - 1)), ...s.truth.map(Math.abs)]));
  const x = value => pad.left + (value - low) / (high - low) * (W - pad.left - pad.right);
  const y = value => pad.top + (1 - value / extent) / 2 * (H - pad.top - pad.bottom);
  return make("div", { class: "charts" }, series.map(({ name, slope, truth }) => make("figure", {}, make("figcaption", {}, name),
    make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name}: predicted ${number(slope * (factor - 1))}; ${strengths.map((s, i) => `at ${s} z true ${number(truth[i])}, predicted ${number(slope * (s - 1))}`).join("; ")}` },
      make("line", { class: "axis", x1: pad.left, x2: W - pad.right, y1: y(0), y2: y(0) }),
      make("line", { class: "axis", x1: x(1), x2: x(1), y1: pad.top, y2: H - pad.bottom }),
      [extent, 0, -extent].map(value => make("text", { x: pad.left - 4, y: y(value) + 3, "text-anchor": "end" }, number(value))),
      [low, 1, high].map(value => make("text", { x: x(value), y: H - 4, "text-anchor": "middle" }, `${value}z`)),
      strengths.map((s, i) => make("line", { class: "gap", x1: x(s), x2: x(s), y1: y(slope * (s - 1)), y2: y(truth[i]) })),
      make("line", { class: "predicted", x1: x(low), x2: x(high), y1: y(slope * (low - 1)), y2: y(slope * (high - 1)) }),
      strengths.map((s, i) => make("circle", { class: "true", cx: x(s), cy: y(truth[i]), r: 3.2 })),
      make("circle", { class: "now", cx: x(factor), cy: y(slope * (factor - 1)), r: 4 })))),
    make("p", { class: "key soft" }, make("span", { class: "k-line" }), " predicted ", make("span", { class: "k-dot" }), " true run ", make("span", { class: "k-gap" }), " gap"));
}
