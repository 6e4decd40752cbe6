// A choice of class shows only its images.
(() => {
  "use strict";
  const label = document.getElementById("class-filter");
  const cards = document.getElementById("cards");
  if (!label || !cards) return;
  const counts = new Map();
  for (const card of cards.children) counts.set(card.dataset.class, (counts.get(card.dataset.class) || 0) + 1);
  if (counts.size < 2) return;
  const select = label.querySelector("select");
  select.add(new Option("all classes", "-1"));
  const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  names.forEach((name, i) => select.add(new Option(`${name} (${counts.get(name)})`, String(i))));
  select.addEventListener("change", () => {
    const chosen = names[Number(select.value)];
    for (const card of cards.children) card.hidden = chosen !== undefined && card.dataset.class !== chosen;
  });
  label.hidden = false;
})();
