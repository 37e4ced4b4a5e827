// What the reader has done: pins, groups, labels, thresholds, moved boxes, clamps. It stands in the address (after "#"), can be
// saved as JSON and opened again; labels also go to a file that UnitLabels.load reads.

const freshState = () => ({
  pins: new Set(), groups: [], labels: {}, edges: null, influence: 1, view: "graph", only: "all", moved: new Map(),
  clamps: new Map(), selected: null, marked: new Set(), theory: "frozen",
});
let STATE = freshState();
const WATCHERS = [];
let remembering = 0, drawing = 0;

const isPinned = node => STATE.pins.has(node);
const groupOf = node => STATE.groups.find(group => group.members.includes(node)) ?? null;

// Everything that shows the state is drawn once before the next frame; the address follows a little later.
function changed(remember = true) {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; WATCHERS.forEach(watch => watch()); });
  if (!remember) return;
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    const text = encodeState();
    // A notebook's frame has no address of its own.
    try { history.replaceState(null, "", text ? "#s=" + text : location.pathname + location.search); } catch { /* as said */ }
  }, 250);
}

function startGroups() {
  STATE.groups = DATA.groups.map(group => ({ name: group.name, open: false, members: group.members.map(i => GRAPHS[0].nodes[i]) }));
}

function togglePin(node) {
  if (!STATE.pins.delete(node)) STATE.pins.add(node);
  say(`${titleOf(node)} ${isPinned(node) ? "pinned" : "no longer pinned"}`);
  changed();
}

// A group of these nodes, taken out of the groups that they were in.
function groupNodes(nodes, name) {
  const unique = [...new Set(nodes)];
  for (const group of STATE.groups) group.members = group.members.filter(node => !unique.includes(node));
  const made = { name: name ?? commonName(unique), open: false, members: unique };
  STATE.groups = [...STATE.groups.filter(group => group.members.length), made];
  unique.forEach(node => STATE.pins.add(node));
  STATE.marked.clear();
  say(`${plural(unique.length, "node")} grouped as ${made.name}`);
  changed();
  return made;
}
function commonName(nodes) {
  const names = [...new Set(nodes.map(titleOf))];
  return names.length === 1 ? names[0] : `group ${STATE.groups.length + 1}`;
}
function leaveGroup(node) {
  for (const group of STATE.groups) group.members = group.members.filter(member => member !== node);
  STATE.groups = STATE.groups.filter(group => group.members.length);
  changed();
}

function setLabel(unit, about) {
  const known = DATA.units[unit] ?? {}, label = about.label.trim(), note = about.note.trim();
  if (label === (known.label ?? "") && note === (known.note ?? "")) delete STATE.labels[unit];
  else STATE.labels[unit] = { label, note };
  changed();
}

// ---------------------------------------------------------------------------------------------- as text and back

// Plain values; nodes by `name` (a file, which may be opened beside other graphs) or by number (the address, which is short).
function plainState(name) {
  const plain = {};
  const put = (key, value, usual) => { if (JSON.stringify(value) !== JSON.stringify(usual)) plain[key] = value; };
  put("pins", [...STATE.pins].map(name), []);
  put("groups", STATE.groups.map(g => ({ name: g.name, open: g.open, members: g.members.map(name) })), []);
  put("labels", STATE.labels, {});
  put("edges", STATE.edges, null);
  put("influence", STATE.influence, 1);
  put("view", STATE.view, "graph");
  put("only", STATE.only, "all");
  put("moved", [...STATE.moved].map(([node, by]) => [name(node), ...by.map(Math.round)]), []);
  put("clamps", [...STATE.clamps].map(([node, factor]) => [name(node), factor]), []);
  put("selected", STATE.selected ? name(STATE.selected) : null, null);
  put("theory", STATE.theory, "frozen");
  return plain;
}

// What of plain values can be used here: nodes that this page does not have are left out, values of another kind as well.
function takeState(plain, node) {
  const state = freshState(), list = value => Array.isArray(value) ? value : [];
  const finite = value => typeof value === "number" && Number.isFinite(value);
  state.pins = new Set(list(plain.pins).map(node).filter(Boolean));
  const grouped = new Set();
  state.groups = list(plain.groups).map(g => ({
    name: String(g.name ?? "group"), open: Boolean(g.open),
    members: list(g.members).map(node).filter(n => n && !grouped.has(n) && grouped.add(n)),
  })).filter(g => g.members.length);
  for (const [unit, about] of Object.entries(plain.labels ?? {})) {
    if (DATA.units[unit] && about) state.labels[unit] = { label: String(about.label ?? ""), note: String(about.note ?? "") };
  }
  if (finite(plain.edges)) state.edges = Math.max(0, plain.edges);
  if (finite(plain.influence)) state.influence = Math.min(1, Math.max(0, plain.influence));
  if (plain.view === "table") state.view = "table";
  if (plain.only === "pinned") state.only = "pinned";
  if (plain.theory === "drawn") state.theory = "drawn";
  for (const [name, x, y] of list(plain.moved)) if (node(name) && finite(x) && finite(y)) state.moved.set(node(name), [x, y]);
  for (const [name, factor] of list(plain.clamps)) if (node(name) && finite(factor)) state.clamps.set(node(name), factor);
  state.selected = node(plain.selected) ?? null;
  STATE = state;
}

function encodeState() {
  const plain = plainState(node => node.id);
  if (JSON.stringify(plain.groups) === JSON.stringify(ORIGINAL.groups)) delete plain.groups;
  else plain.groups = plain.groups ?? [];
  if (!Object.keys(plain).length) return "";
  const bytes = new TextEncoder().encode(JSON.stringify({ n: NODES.length, ...plain }));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}
function decodeState() {
  const text = new URLSearchParams(location.hash.slice(1)).get("s");
  if (!text) return false;
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), letter => letter.charCodeAt(0));
    const plain = JSON.parse(new TextDecoder().decode(bytes));
    if (plain.n !== NODES.length) throw new Error("another graph");
    takeState({ ...ORIGINAL, ...plain }, id => NODES[id]);
    return true;
  } catch {
    say("The address holds a view of another graph; it was passed over.");
    return false;
  }
}
let ORIGINAL = {};
function rememberOriginal() {
  startGroups();
  ORIGINAL = { groups: plainState(node => node.id).groups };
}

// ---------------------------------------------------------------------------------------------- files

const nameOf = node => GRAPHS.length > 1 ? `${node.graph.index}:${node.name}` : node.name;
const nodeNamed = name => NODES.find(node => nameOf(node) === name || (node.graph.index === 0 && node.name === name));

function download(text, name, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
function saveState() {
  download(JSON.stringify({ swd_lens: "graph view", version: DATA.version, ...plainState(nameOf) }, null, 1), "graph-view.json", "application/json");
  say("The view was saved as graph-view.json");
}
async function openState(file) {
  try {
    const plain = JSON.parse(await file.text());
    if (plain.swd_lens !== "graph view") throw new Error("no view of a graph");
    takeState(plain, nodeNamed);
    say(`${file.name} was opened`);
    changed();
  } catch (error) {
    say(`${file.name} could not be opened: ${error.message}`, true);
  }
}
// Labels of the page's units, those brought along and those typed here, with the identity of their factors.
function labelEntries() {
  return Object.keys(DATA.units).map(unit => {
    const about = { ...DATA.units[unit], ...STATE.labels[unit] };
    const author = unit in STATE.labels ? "" : about.author ?? "";
    const factors = DATA.factors[unit.slice(0, unit.lastIndexOf("/"))] ?? "";
    return { unit, label: about.label ?? "", note: about.note ?? "", author, factors };
  }).filter(entry => entry.label);
}
function saveLabels() {
  const entries = labelEntries();
  if (!entries.length) { say("There are no labels yet: select a unit and type one.", true); return; }
  download(labelLines(entries), "unit-labels.jsonl", "application/jsonl");
  say(`${plural(entries.length, "label")} saved as unit-labels.jsonl; UnitLabels.load reads them`);
}

function say(text, alarm = false) {
  byId("live").textContent = text;
  if (alarm) {
    const notice = make("p", { class: "notice", role: "alert" }, text);
    document.body.append(notice);
    setTimeout(() => notice.remove(), 6000);
  }
}
