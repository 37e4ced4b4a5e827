// Measures one page from outside (in a frame of its own) and tries its panels; what is wrong comes back as a list of sentences.
async function probe(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement, wrong = [];
  const need = (fine, what) => { if (!fine) wrong.push(what); };
  const all = selector => [...page.querySelectorAll(selector)];
  const tell = element => element.outerHTML.slice(0, 90);
  const wait = () => new Promise(done => view.setTimeout(done, 300));
  await wait();

  const clipped = element => element.parentElement && (
    view.getComputedStyle(element.parentElement).overflowX !== "visible" || clipped(element.parentElement));
  const right = element => clipped(element) ? 0 : element.getBoundingClientRect().right;
  const widest = all("body *").sort((a, b) => right(b) - right(a))[0];
  need(root.scrollWidth <= root.clientWidth, `${root.scrollWidth - root.clientWidth} pixels too wide: ${tell(widest)} at ${right(widest)} of ${root.clientWidth}`);
  for (const use of all("use")) need(page.querySelector(use.getAttribute("href")), `dangling ${tell(use)}`);
  const fetched = view.performance.getEntriesByType("resource").filter(entry => !entry.name.startsWith("data:"));
  need(fetched.length === 0, `fetched ${fetched.map(entry => entry.name)}`);
  accessible();
  const panels = all("[data-swd-panel]");
  // They are drawn one after the other.
  for (let i = 0; i < 100 && panels.some(panel => !panel.querySelector("canvas")); i++) await wait();
  for (const panel of panels) await click(panel);
  for (const radio of all(".switch input")) {
    radio.click();
    const shown = [...radio.closest("figure").querySelectorAll(".task-grid")].filter(grid => grid.checkVisibility());
    need(shown.length === 1 && shown[0].classList.contains(`of-${radio.value}`), `switched to ${radio.value}: ${shown.map(tell)}`);
  }
  accessible();
  wrong.push(...view.complaints);
  return { wrong: [...new Set(wrong)], panels: panels.length, buttons: all('[role="button"]').length };

  // A head is clicked, another one focused and entered, a third by the space bar: each comes up in full size and stays.
  async function click(panel) {
    const zoomed = () => [...panel.querySelectorAll("h3")].map(h => h.textContent).find(text => text.includes("Zoomed"));
    const heads = [...panel.querySelectorAll('[role="button"]')];
    need(heads.length > 0, `no heads in ${tell(panel)}`);
    const acts = [
      head => { head.dispatchEvent(new view.MouseEvent("click", { bubbles: true })); },
      head => press(head, "Enter"),
      head => press(head, " "),
    ];
    for (const [i, act] of acts.entries()) {
      const head = heads[(heads.length - 1 - i + heads.length) % heads.length];
      if (heads.length <= i) continue;
      act(head);
      await wait();
      const name = head.getAttribute("aria-label");
      need(zoomed() === `${name} Zoomed`, `act ${i} on ${name} shows ${zoomed()}`);
    }
  }
  function press(head, key) {
    head.focus();
    need(page.activeElement === head, `cannot be focused: ${tell(head)}`);
    head.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  }

  function accessible() {
    need(root.lang === "en" && page.title, "no language or title");
    if (all("main").length) structure();
    const ids = all("[id]").map(element => element.id);
    for (const id of new Set(ids)) need(ids.indexOf(id) === ids.lastIndexOf(id), `id ${id} twice`);
    for (const one of all("svg, canvas, img, [role='img']")) {
      const drawnPart = one.closest("svg") !== null && one.closest("svg") !== one;
      const hidden = one.closest("[aria-hidden='true']") !== null;
      need(drawnPart || hidden || one.alt || named(one), `no text alternative: ${tell(one)}`);
    }
    for (const one of all("a[href], button, summary, input, select, [role='button'], [role='region'], [tabindex='0']")) {
      need(named(one), `no name: ${tell(one)}`);
      need(one.tabIndex >= 0, `not reachable: ${tell(one)}`);
    }
    for (const one of all("[tabindex]")) need(one.tabIndex <= 0, `tabindex ${one.tabIndex}`);
    for (const one of all("[aria-labelledby], [aria-describedby]")) {
      const named = `${one.getAttribute("aria-labelledby") || ""} ${one.getAttribute("aria-describedby") || ""}`;
      for (const id of named.split(" ").filter(Boolean)) need(page.getElementById(id), `${id} labels nothing`);
    }
    for (const one of all("main *, body > *")) {
      const scrolls = ["auto", "scroll"].includes(view.getComputedStyle(one).overflowX) && one.scrollWidth > one.clientWidth + 1;
      need(!scrolls || one.tabIndex === 0 || one.querySelector("a, [tabindex='0']"), `scrolls for the mouse only: ${tell(one)}`);
    }
    contrast();
  }
  function structure() {
    need(all("main").length === 1 && all("h1").length === 1, "more than one main or h1");
    need(all("nav").every(nav => named(nav)), "a nav without a name");
    let level = 0;
    for (const heading of all("h1, h2, h3, h4, h5, h6")) {
      if (heading.getAttribute("role") === "presentation" || !heading.checkVisibility()) continue;
      const next = Number(heading.tagName[1]);
      need(next <= level + 1, `h${level} is followed by ${tell(heading)}`);
      level = next;
    }
    for (const table of all("main table")) {
      need(table.caption && table.caption.textContent.trim(), "a table without a caption");
      for (const th of table.querySelectorAll("th")) need(th.scope, `no scope: ${tell(th)}`);
    }
  }
  function named(element) {
    const labels = (element.getAttribute("aria-labelledby") || "").split(" ").map(id => id && page.getElementById(id));
    const title = element.tagName === "svg" && element.querySelector("title");
    const said = [element.getAttribute("aria-label"), title && title.textContent, ...labels.map(l => l && l.textContent)];
    return said.some(text => text && text.trim()) || (element.tagName !== "svg" && element.textContent.trim() !== "");
  }

  // WCAG 1.4.3: text stands out from what is behind it by 4.5 to 1, large text by 3.
  function contrast() {
    const walker = page.createTreeWalker(page.body, view.NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement, style = view.getComputedStyle(element);
      if (!walker.currentNode.data.trim() || element.closest("svg, script, style, .skip") || !element.checkVisibility()) continue;
      const back = ground(element), size = parseFloat(style.fontSize);
      const ratio = between(light(over(parse(style.color), back)), light(back));
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      need(ratio >= (large ? 3 : 4.5), `contrast ${ratio.toFixed(2)} of ${tell(element)}`);
    }
  }
  function parse(text) {
    const [r, g, b, a = 1] = (text.match(/[\d.]+/g) || []).map(Number);
    return [r, g, b, a];
  }
  function over([r, g, b, a], [x, y, z]) { return [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1]; }
  function ground(element) {
    const stack = [];
    for (let at = element; at; at = at.parentElement) stack.push(parse(view.getComputedStyle(at).backgroundColor));
    const dark = view.matchMedia("(prefers-color-scheme: dark)").matches;
    return stack.reverse().reduce((below, layer) => over(layer, below), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  }
  function light([r, g, b]) {
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  }
  function between(a, b) { return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }
}
