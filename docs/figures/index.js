// Fills every <div data-figure="trace"> of a page from the module of that name. What the element holds until then is
// what a reader without JavaScript sees.

const FIGURES = ["trace", "batch", "tree"];

for (const place of document.querySelectorAll("[data-figure]")) {
  if (!FIGURES.includes(place.dataset.figure)) throw new Error(`there is no figure ${place.dataset.figure}`);
  const { mount } = await import(`./${place.dataset.figure}.js`);
  await mount(place);
  place.classList.add("is-live");
}
