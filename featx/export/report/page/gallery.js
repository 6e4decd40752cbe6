// A click on a wrong cell of the confusion matrix shows only its images in the gallery.
(() => {
  "use strict";
  const gallery = document.getElementById("gallery");
  const note = document.getElementById("gallery-filter");
  if (!gallery || !note) return;
  const images = [...gallery.children];
  const cells = [...document.querySelectorAll(".heat button")];
  const show = (cell) => {
    const { true: own, predicted } = cell ? cell.dataset : {};
    let shown = 0;
    for (const image of images) {
      const fits = !cell || (image.dataset.true === own && image.dataset.predicted === predicted);
      image.hidden = !fits;
      shown += fits;
    }
    for (const other of cells) other.setAttribute("aria-pressed", String(other === cell));
    note.hidden = !cell;
    if (cell) {
      note.querySelector("span").textContent =
        shown ? `${own} predicted as ${predicted}` : `${own} predicted as ${predicted}: not among the images shown`;
    }
  };
  for (const cell of cells) {
    cell.addEventListener("click", () => {
      show(cell.getAttribute("aria-pressed") === "true" ? null : cell);
      document.getElementById("errors").scrollIntoView();
    });
  }
  note.querySelector("button").addEventListener("click", () => show(null));
})();
