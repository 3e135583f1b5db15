// The figure of the tour: a recorded run, stage by stage. trace.json is what the engine's parts handed on to each other,
// with the milliseconds that each took (record_trace.py); nothing here is made up, and nothing is computed but sums.

import { Player, element } from "./dom.js";

const PAUSE_MS = 1300;
const STAGES = ["route", "tokenize", "carry", "schedule", "compute", "sample", "tell"];
const PROMPT = "The capital of France is";

export async function mount(place) {
  const response = await fetch(new URL("trace.json", import.meta.url));
  if (!response.ok) throw new Error(`trace.json: ${response.status}`);
  const frames = await response.json();
  place.replaceChildren();
  new TraceFigure(place, frames);
}

class TraceFigure {
  constructor(place, frames) {
    this.frames = frames;
    this.stations = STAGES.map((name, i) =>
      element("li", { class: "fig-station", onclick: () => this.player.byHand(() => this.show(this.visitOf(i + 1))) },
        element("button", { type: "button", "aria-label": `stage ${i + 1}: ${name}` }, String(i + 1)), element("span", {}, name)));
    this.packet = element("li", { class: "fig-packet", "aria-hidden": "true" });
    this.title = element("h4", { class: "fig-act" });
    this.facts = element("dl", { class: "fig-facts" });
    this.answer = element("p", { class: "fig-answer" });
    this.times = element("div", { class: "fig-times" });
    this.shares = element("p", { class: "fig-legend" });
    const controls = {
      next: () => this.show(this.at + 1),
      back: () => this.show(this.at - 1),
      hasNext: () => this.at < frames.length - 1,
      hasBack: () => this.at > 0,
      restart: () => this.show(0),
    };
    this.at = 0;
    this.player = new Player(place, controls, PAUSE_MS);
    place.append(
      element("div", { class: "fig-processes", "aria-hidden": "true" }, element("span", {}, "API process"), element("span", {}, "engine process"), element("span", {}, "both")),
      element("ol", { class: "fig-track", "aria-label": "The seven stages" }, ...this.stations, this.packet),
      this.player.element,
      element("div", { class: "fig-panel", "aria-live": "polite" }, this.title, this.facts),
      this.answer, this.times, this.shares,
    );
    this.show(0);
  }

  /** The frame of a stage in the step that is shown, or in the first one. */
  visitOf(stage) {
    const seen = this.frames.findLastIndex((frame, i) => frame.stage === stage && i <= this.at);
    return seen >= 0 ? seen : this.frames.findIndex((frame) => frame.stage === stage);
  }

  show(index) {
    this.at = index;
    const frame = this.frames[index];
    const past = this.frames.slice(0, index + 1);
    const step = past.filter((other) => other.stage === 4).length;
    this.stations.forEach((station, i) => {
      station.classList.toggle("is-now", i + 1 === frame.stage);
      station.classList.toggle("is-past", past.some((other) => other.stage === i + 1));
      if (i + 1 === frame.stage) station.setAttribute("aria-current", "step");
      else station.removeAttribute("aria-current");
    });
    this.packet.style.setProperty("--at", frame.stage - 1);
    this.title.replaceChildren(`${frame.stage} ${STAGES[frame.stage - 1]}`, element("small", {}, `${step ? `step ${step} · ` : ""}${inMs(frame.ms)} · ${frame.where}`));
    this.facts.replaceChildren(...Object.entries(frame.facts).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
    const said = past.map((other) => other.says ?? "").join("");
    this.answer.replaceChildren(element("span", {}, PROMPT), element("mark", {}, said.replaceAll("\n", "↵")));
    this.drawTimes(past);
    this.player.refresh();
  }

  drawTimes(past) {
    const total = past.reduce((sum, frame) => sum + frame.ms, 0);
    const sums = STAGES.map((_, i) => past.filter((frame) => frame.stage === i + 1).reduce((sum, frame) => sum + frame.ms, 0));
    const bars = sums.map((ms, i) => element("span", { style: `flex-grow: ${ms / total}`, class: `fig-time is-${i + 1}`, title: `${STAGES[i]}: ${inMs(ms)}` }));
    this.times.replaceChildren(...bars);
    const longest = sums.indexOf(Math.max(...sums));
    this.shares.textContent = `${inMs(total)} so far; ${STAGES[longest]} took ${((100 * sums[longest]) / total).toFixed(1)} % of it (a recorded run on a CPU, one thread, float32)`;
  }
}

const inMs = (ms) => (ms >= 10 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(ms >= 0.1 ? 1 : 3)} ms`);
