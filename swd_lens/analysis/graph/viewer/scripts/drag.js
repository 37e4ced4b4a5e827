// Mouse, pen and fingers on a graph: a box is dragged (onto another one: they become a group), the ground moves the window, two
// fingers and Ctrl with the wheel zoom; a click selects, with Shift it marks, a double click pins.

const SLACK = 4;  // pixels that a click may move

Scene.prototype.listen = function () {
  const svg = this.svg, fingers = new Map();
  let start = null, frame = 0, last = null;
  const at = event => { const r = svg.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  const itemOf = event => event.target.closest?.(".node")?.item ?? null;

  svg.addEventListener("pointerdown", event => {
    if (event.button) return;
    fingers.set(event.pointerId, at(event));
    hideHover();
    if (fingers.size === 2) { this.letGo(); start = { spread: spread(fingers) }; return; }
    svg.setPointerCapture(event.pointerId);
    start = { at: at(event), item: itemOf(event), view: { ...this.view }, moved: false, link: itemOf(event) ? null : this.linkAt(at(event)) };
  });
  svg.addEventListener("pointermove", event => {
    last = event;
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; move(last); });
  });
  const move = event => {
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, at(event));
    if (!start || !fingers.size) { this.pointAt(event, itemOf(event), at(event)); return; }
    if (start.spread) {
      const now = spread(fingers);
      this.zoomBy(now.distance / start.spread.distance, now.middle);
      this.view.x += now.middle[0] - start.spread.middle[0];
      this.view.y += now.middle[1] - start.spread.middle[1];
      start.spread = now;
      this.apply(true);
      return;
    }
    const [x, y] = at(event), dx = x - start.at[0], dy = y - start.at[1];
    if (!start.moved && Math.hypot(dx, dy) < SLACK) return;
    if (!start.moved) { start.moved = true; if (start.item) this.hold(start.item); else svg.classList.add("panning"); }
    if (start.item) this.dragTo(start.item, dx / this.view.k, dy / this.view.k);
    else { this.view = { ...start.view, x: start.view.x + dx, y: start.view.y + dy }; this.apply(true); }
  };
  const end = event => {
    if (frame && last) { cancelAnimationFrame(frame); frame = 0; move(last); }
    fingers.delete(event.pointerId);
    svg.classList.remove("panning");
    if (!start || start.spread) { if (!fingers.size) start = null; return; }
    const { item, link, moved } = start;
    start = null;
    if (moved && item) this.drop(item);
    else if (!moved && event.type === "pointerup") this.click(event, item, link);
  };
  svg.addEventListener("pointerup", end);
  svg.addEventListener("pointercancel", event => { this.letGo(); end(event); });
  svg.addEventListener("pointerleave", () => { if (!start) this.pointAt(null, null); });
  svg.addEventListener("dblclick", event => { const item = this.itemUnder(at(event)); if (item) item.nodes.forEach(togglePin); });
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    hideHover();
    if (event.ctrlKey || event.metaKey) this.zoomBy(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0022)), at(event));
    else {
      const unit = event.deltaMode ? 30 : 1;
      this.view.x -= (event.shiftKey ? event.deltaY : event.deltaX) * unit;
      this.view.y -= (event.shiftKey ? 0 : event.deltaY) * unit;
      this.apply(true);
    }
  }, { passive: false });
  svg.addEventListener("focusin", event => {
    const item = itemOf(event);
    if (item && event.target.matches(":focus-visible")) { select(item.lead); this.reveal(item); }
  });
};

const spread = fingers => {
  const [a, b] = [...fingers.values()];
  return { distance: Math.max(1, Math.hypot(a[0] - b[0], a[1] - b[1])), middle: [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2] };
};

// ---------------------------------------------------------------------------------------------- dragging

// The canvas of all edges stays as it is, faded: it shows where the box was. Its edges as they are now are on the other canvas.
Scene.prototype.hold = function (item) {
  this.held = item;
  this.began = [item.x, item.y];
  this.nodes.append(this.boxOf(item));
  this.svg.classList.remove("focused");
  this.boxOf(item).classList.add("held");
};
Scene.prototype.dragTo = function (item, dx, dy) {
  [item.x, item.y] = [this.began[0] + dx, this.began[1] + dy];
  this.boxOf(item).setAttribute("transform", `translate(${item.x - BOX.width / 2} ${item.y})`);
  const target = this.targetOf(item);
  if (target !== this.target) {
    if (this.target) this.boxOf(this.target)?.classList.remove("target");
    if (target) this.boxOf(target).classList.add("target");
    this.target = target;
  }
  this.paintOver();
};
// The box whose middle the held one covers.
Scene.prototype.targetOf = function (held) {
  return this.items.find(item => item !== held && item.lead.kind === held.lead.kind
    && Math.abs(item.x - held.x) < BOX.width * 0.38 && Math.abs(item.y - held.y) < BOX.height * 0.45) ?? null;
};
Scene.prototype.drop = function (item) {
  const target = this.target;
  if (target) {
    const group = target.group, nodes = [...target.nodes, ...item.nodes];
    this.letGo();
    if (group) {
      group.members = [...new Set([...group.members, ...item.nodes])];
      STATE.groups = STATE.groups.map(g => g === group ? g : { ...g, members: g.members.filter(n => !item.nodes.includes(n)) }).filter(g => g.members.length);
      say(`${titleOf(item.lead)} joined ${group.name}`);
    } else groupNodes(nodes, item.group?.name);
    select(nodes[0]);
  } else {
    STATE.moved.set(item.lead, [item.x - item.home[0], item.y - item.home[1]]);
    this.letGo();
  }
  changed();
};
Scene.prototype.letGo = function () {
  if (!this.held) return;
  this.boxOf(this.held)?.classList.remove("held");
  if (this.target) this.boxOf(this.target)?.classList.remove("target");
  this.held = this.target = null;
  changed(false);
};

// ---------------------------------------------------------------------------------------------- pointing

Scene.prototype.click = function (event, item, link) {
  if (!item) {
    if (link) selectLink(link);
    else { select(null); STATE.marked.clear(); }
    return;
  }
  if (event.shiftKey) {
    for (const node of item.nodes) if (!STATE.marked.delete(node)) STATE.marked.add(node);
    changed(false);
  } else select(item.lead);
  this.boxOf(item)?.focus({ preventScroll: true });
};
Scene.prototype.itemUnder = function ([x, y]) {
  const { k, x: left, y: top } = this.view, px = (x - left) / k, py = (y - top) / k;
  return this.items.find(item => Math.abs(item.x - px) <= BOX.width / 2 && py >= item.y && py <= item.y + BOX.height) ?? null;
};
// The link that runs nearest to a point, within 7 pixels.
Scene.prototype.linkAt = function ([x, y]) {
  const { k, x: left, y: top } = this.view, px = (x - left) / k, py = (y - top) / k, reach = 7 / k;
  let best = null, nearest = reach;
  for (let i = this.links.length - 1; i >= 0; i--) {
    const link = this.links[i], [a, b, c, d, e, f, g, h] = curve(link);
    if (py < Math.min(b, d, f, h) - reach || py > Math.max(b, d, f, h) + reach || px < Math.min(a, g) - reach || px > Math.max(a, g) + reach) continue;
    for (let step = 0; step <= 24; step++) {
      const t = step / 24, u = 1 - t, w = [u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t];
      const distance = Math.hypot(w[0] * a + w[1] * c + w[2] * e + w[3] * g - px, w[0] * b + w[1] * d + w[2] * f + w[3] * h - py);
      if (distance < nearest) [best, nearest] = [link, distance];
    }
  }
  return best;
};
Scene.prototype.pointAt = function (event, item, at) {
  const unit = item && item.lead.of, mouse = event && event.pointerType === "mouse";
  const link = mouse && !item && at ? this.linkAt(at) : null;
  this.svg.classList.toggle("on-link", Boolean(link));
  if (item !== this.hovered || link !== this.link) {
    Object.assign(this, { hovered: item, link });
    HOVERED_UNIT = unit;
    SCENES.forEach(scene => scene.repaint());
  }
  if (mouse && item) showHover(item, event.clientX, event.clientY);
  else if (mouse && link) showLinkHover(link, event.clientX, event.clientY);
  else hideHover();
};
