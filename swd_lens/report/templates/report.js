(() => {
  // CircuitsVis writes headings of its own, which would stand among the page's; whoever hears the page is told what changed.
  const adapt = box => {
    box.querySelectorAll("h2, h3, h4").forEach(heading => {
      if (heading.getAttribute("role") !== "presentation") heading.setAttribute("role", "presentation");
      if (heading.tagName === "H3" && heading.textContent.includes("Zoomed")) heading.setAttribute("aria-live", "polite");
    });
  };
  document.querySelectorAll(".swd-cv").forEach(box => {
    new MutationObserver(() => adapt(box)).observe(box, { childList: true, subtree: true });
    adapt(box);
  });
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
