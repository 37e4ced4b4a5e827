(() => {
  // Panels draw themselves one after the other once the page stands, not all before it opens: the script of each draws every
  // panel that is not marked as drawn.
  const draw = panel => {
    panel.removeAttribute("data-drawn");
    const script = document.createElement("script");
    script.textContent = panel.querySelector("script:not([type])").textContent;
    document.head.append(script);
    script.remove();
  };
  const waiting = [...document.querySelectorAll("[data-swd-panel]")];
  const next = () => {
    if (!waiting.length) return;
    draw(waiting.shift());
    setTimeout(next, 20);
  };
  addEventListener("load", () => setTimeout(next, 0));
  // Paper cannot be unfolded.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach(one => { one.open = true; });
  });
  addEventListener("afterprint", () => { opened.forEach(one => { one.open = false; }); });
})();
