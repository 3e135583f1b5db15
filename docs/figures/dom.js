// What the figures draw with: elements, the player's buttons, and a page of the pool. Knows no scheduler and no tree.

/** `element("p", { class: "x", onclick: f }, "text", child)`; attributes that are null or false are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== false));
  return made;
}

/** Put other buttons in the place of these, the focus on the one with the same label, or on the first that can have it. */
export function replaceButtons(place, buttons, otherwise) {
  const before = place.contains(document.activeElement) ? document.activeElement.textContent : null;
  place.replaceChildren(...buttons);
  if (before === null) return;
  const usable = buttons.filter((button) => button.matches("button:not(:disabled)"));
  (usable.find((button) => button.textContent === before) ?? usable[0] ?? otherwise).focus({ preventScroll: true });
}

export const prefersStillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/**
 * Play, step, back and restart, as buttons and as keys: → and ← step, Home restarts, k plays and pauses (p would be the
 * theme’s key for the page before).
 *
 * `controls`: next() and restart(), back() if there is a way back, hasNext() and hasBack() say what is possible now.
 * Keys work wherever the focus is in `place`, but for fields that need them.
 */
export class Player {
  constructor(place, controls, pauseMs) {
    this.controls = controls;
    this.pauseMs = pauseMs;
    this.timer = null;
    const button = (name, label, act) =>
      element("button", { type: "button", class: "fig-button", "data-act": name, onclick: act }, label);
    this.playButton = button("play", "Play", () => this.toggle());
    this.nextButton = button("next", "Step →", () => this.byHand(controls.next));
    this.backButton = controls.back ? button("back", "← Back", () => this.byHand(controls.back)) : null;
    this.restartButton = button("restart", "Restart", () => this.byHand(controls.restart));
    const buttons = [this.playButton, this.backButton, this.nextButton, this.restartButton];
    this.element = element("div", { class: "fig-player", role: "group", "aria-label": "Player" }, ...buttons.filter(Boolean));
    place.addEventListener("keydown", (event) => this.key(event));
    this.refresh();
  }

  key(event) {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = { ArrowRight: this.nextButton, ArrowLeft: this.backButton, Home: this.restartButton, k: this.playButton };
    const button = acts[event.key];
    if (!button) return;
    event.preventDefault();
    button.click();
  }

  byHand(act) {
    this.pause();
    act();
    this.refresh();
  }

  toggle() {
    if (this.timer === null) this.play();
    else this.pause();
  }

  play() {
    this.pause();
    const tick = () => {
      if (!this.controls.hasNext()) return this.pause();
      this.controls.next();
      this.timer = setTimeout(tick, this.pauseMs);
      return this.refresh();
    };
    tick();
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.refresh();
  }

  refresh() {
    this.playButton.textContent = this.timer === null ? "Play" : "Pause";
    this.playButton.disabled = this.timer === null && !this.controls.hasNext();
    this.nextButton.disabled = !this.controls.hasNext();
    if (this.backButton) this.backButton.disabled = !this.controls.hasBack();
  }
}

/** The colour of a request, by its place in the alphabet. */
export const hue = (name) => `var(--fig-hue-${(name.charCodeAt(0) - 65) % 6})`;

export const chip = (name) => element("span", { class: "fig-chip", style: `--hue: ${hue(name)}` }, name);

/** The pool: one square per page, in the colours of who holds it. `holders(page)` → names; `isFree(page)`. */
export function drawPool(numPages, holders, isFree) {
  const squares = Array.from({ length: numPages }, (_, page) => {
    const names = holders(page);
    const state = names.length ? `held by ${names.join(" and ")}` : isFree(page) ? "free" : "cached";
    const kind = names.length ? "is-held" : isFree(page) ? "is-free" : "is-cached";
    const share = 100 / (names.length || 1);
    const stops = names.map((name, i) => `${hue(name)} ${i * share}% ${(i + 1) * share}%`);
    const style = names.length ? `background: linear-gradient(90deg, ${stops.join(", ")})` : null;
    return element("li", { class: `fig-page ${kind}`, style, title: `page ${page}: ${state}`, "aria-label": `page ${page}: ${state}` }, String(page));
  });
  return element("ol", { class: "fig-pool", "aria-label": "Pages of the pool" }, ...squares);
}

export const legend = () =>
  element("p", { class: "fig-legend" },
    element("span", { class: "fig-page is-held is-sample" }), " held by a request ",
    element("span", { class: "fig-page is-cached is-sample" }), " cached, nobody’s ",
    element("span", { class: "fig-page is-free is-sample" }), " free");

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export const listed = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`);

export const pagesNamed = (pages) => `${pages.length === 1 ? "page" : "pages"} ${listed(pages.map(String))}`;
