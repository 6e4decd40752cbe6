// Evaluated by test_report_in_browser.py: opens all folded parts and returns texts that are hard to read.
() => {
  // Texts whose contrast to the nearest opaque background is below 4.5 (WCAG 2.2, 1.4.3).
  const parsed = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const before = parsed(getComputedStyle(e, "::before").backgroundColor);
      if (e.closest(".probs") && before.length === 3) return before;
      const colour = parsed(getComputedStyle(e).backgroundColor);
      if (colour.length === 3) return colour;
    }
    return parsed(getComputedStyle(document.documentElement).backgroundColor);
  };
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest("script,style,title,noscript,option,[hidden]")) continue;
    const style = getComputedStyle(element);
    const ink = parsed(element.closest("svg") ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([node.data.trim().slice(0, 40), element.className.baseVal || element.className, ratio]);
  }
  return found;
}
