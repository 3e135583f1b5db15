// The playground: a conversation, its settings, and what the buttons do.

import { Answer } from "./answer.js";
import { getJson, streamChat } from "./api.js";
import { byId, element } from "./dom.js";
import { showCardsIn } from "./tokens.js";

const conversation = byId("conversation");
const composer = byId("composer");
const message = byId("message");
const settings = byId("settings-form").elements;

let messages = []; // as the API takes them, without the system message
let running = null; // the AbortController of the answer that streams

function send(text) {
  byId("welcome").hidden = true;
  messages.push({ role: "user", content: text });
  const label = element("h3", { className: "for-screen-readers" }, "You");
  conversation.append(element("article", { className: "question" }, label, element("div", { className: "text" }, text)));
  answer();
}

async function answer() {
  const shown = new Answer();
  const controller = (running = new AbortController());
  dropActions();
  conversation.append(shown.node);
  setBusy(true);
  scrollToEnd();
  try {
    for await (const chunk of streamChat(requestBody(), { key: settings.key.value, signal: controller.signal })) {
      const follows = isAtEnd();
      shown.add(chunk);
      if (follows) scrollToEnd();
    }
    shown.end();
  } catch (error) {
    const wasStopped = controller.signal.aborted;
    shown.end(wasStopped ? "stopped" : "error");
    if (!wasStopped) shown.stats.before(element("p", { className: "error", role: "alert" }, sentence(error.message)));
  }
  if (running !== controller) return; // a new chat has begun
  running = null;
  if (shown.content) messages.push({ role: "assistant", content: shown.content });
  shown.actions.append(...actionsFor(shown));
  byId("status").textContent = shown.summary;
  setBusy(false);
  scrollToEnd();
}

function requestBody() {
  const number = (name) => (settings[name].value === "" ? undefined : Number(settings[name].value));
  const system = settings.system.value.trim();
  return {
    model: settings.model.value || undefined,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    ...(settings.logprobs.checked ? { logprobs: true, top_logprobs: 5 } : {}),
  };
}

/** Buttons below the latest answer. */
function actionsFor(shown) {
  const retry = element("button", { type: "button" }, "Retry");
  retry.addEventListener("click", () => {
    if (messages.at(-1)?.role === "assistant") messages.pop();
    shown.node.remove();
    message.focus();
    answer();
  });
  if (!shown.content) return [retry];
  const copy = element("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(shown.content);
    copy.textContent = "Copied";
  });
  return navigator.clipboard ? [retry, copy] : [retry];
}

function dropActions() {
  for (const actions of conversation.querySelectorAll(".actions")) actions.replaceChildren();
}

function startAnew() {
  running?.abort();
  running = null;
  messages = [];
  for (const turn of conversation.querySelectorAll("article")) turn.remove();
  byId("welcome").hidden = false;
  setBusy(false);
  message.focus();
}

function setBusy(isBusy) {
  conversation.ariaBusy = String(isBusy);
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (hadFocus) byId(isBusy ? "stop" : "send").focus();
}

const isAtEnd = () => conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 40;
const scrollToEnd = () => (conversation.scrollTop = conversation.scrollHeight);
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

async function loadModels() {
  try {
    const { data } = await getJson("v1/models", settings.key.value);
    settings.model.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    byId("model-name").textContent = data[0].id;
  } catch (error) {
    if (error.status === 401) byId("settings").open = true; // where the key goes
  }
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value.trim();
  if (!text || running) return;
  message.value = "";
  send(text);
});

message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  composer.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && byId("token-card").hidden) running?.abort();
});

conversation.querySelector(".suggestions").addEventListener("click", (event) => {
  if (event.target.matches("button") && !running) send(event.target.textContent);
});

byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", startAnew);
byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
settings.key.addEventListener("change", loadModels);

const wide = matchMedia("(min-width: 60rem)");
const fitSettings = () => (byId("settings").open = wide.matches);
wide.addEventListener("change", fitSettings);

fitSettings();
showCardsIn(conversation);
loadModels();
if (wide.matches) message.focus(); // on a phone this would open the keyboard
