// The API's description, made readable: each route with its fields and its examples as commands to copy.

import { getJson } from "./api.js";
import { byId, element } from "./dom.js";

async function show() {
  byId("key-form").hidden = byId("failure").hidden = true;
  try {
    render(await getJson("openapi.json", byId("key").value));
  } catch (error) {
    byId("key-form").hidden = error.status !== 401;
    byId("failure").hidden = error.status === 401 && !byId("key").value;
    byId("failure").textContent = error.message;
  }
  byId("routes").ariaBusy = "false";
}

function render(document) {
  const byTag = new Map();
  for (const [path, methods] of Object.entries(document.paths))
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "Other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), route(path, method, operation, document.components.schemas)]);
    }
  for (const [tag, routes] of byTag)
    byId("routes").append(element("section", {}, element("h2", {}, tag), ...routes));
}

function route(path, method, operation, schemas) {
  const parts = [element("p", {}, operation.description ?? operation.summary)];
  const content = operation.requestBody?.content["application/json"];
  if (content) {
    parts.push(...Object.entries(content.examples).map(([title, { value }]) => example(title, path, value)));
    const forms = content.schema.anyOf ?? [content.schema]; // /generate takes one body or the other
    parts.push(...forms.map((form) => fields(resolve(form, schemas), schemas)));
  }
  const verb = element("span", { className: "verb" }, method.toUpperCase());
  return element("details", { className: "route" }, element("summary", {}, verb, " ", element("code", {}, path)), ...parts);
}

function example(title, path, value) {
  const body = JSON.stringify(value, null, 2).replaceAll("'", "'\\''");
  const url = new URL(`.${path}`, location.href);
  const command = `curl ${url} -H 'content-type: application/json' -d '${body}'`;
  const copy = element("button", { type: "button", ariaLabel: `Copy the example: ${title}` }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command);
    copy.textContent = "Copied";
  });
  const caption = element("figcaption", {}, title, navigator.clipboard ? copy : "");
  return element("figure", {}, caption, element("pre", { tabIndex: 0 }, element("code", {}, command)));
}

function fields(schema, schemas) {
  const required = new Set(schema.required);
  const entries = Object.entries(schema.properties);
  entries.sort(([one], [other]) => required.has(other) - required.has(one)); // what must be there comes first
  const rows = entries.map(([name, field]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, element("code", {}, name)),
      element("td", {}, [typeName(field, schemas), required.has(name) && "required", range(field)].filter(Boolean).join(", ")),
    ),
  );
  const titles = ["Field", "Type and limits"].map((title) => element("th", { scope: "col" }, title));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows));
  return element("div", { className: "table", tabIndex: 0, role: "group", ariaLabel: "Fields" }, table);
}

function typeName(field, schemas) {
  if (field.$ref) return typeName(resolve(field, schemas), schemas);
  if (field.anyOf) {
    const choices = field.anyOf.filter((choice) => choice.type !== "null"); // null is the same as leaving it out
    return [...new Set(choices.map((choice) => typeName(choice, schemas)))].join(" or ");
  }
  if (field.enum) return field.enum.map((value) => JSON.stringify(value)).join(", ");
  if (field.const !== undefined) return JSON.stringify(field.const);
  if (field.type === "array") return `list of ${typeName(field.items ?? {}, schemas)}`;
  return field.type === "null" ? "not supported" : (field.type ?? "any");
}

/** The limits of a number, text or list, and what is taken where it is left out. */
function range(field) {
  const choices = [field, ...(field.anyOf ?? [])];
  const first = (...names) => choices.flatMap((choice) => names.map((name) => choice[name])).find((x) => x !== undefined);
  const [low, high] = [first("minimum", "minLength", "minItems"), first("maximum", "maxLength", "maxItems")];
  const limits = [low === undefined ? "" : `at least ${low}`, high === undefined ? "" : `at most ${high}`];
  const standard = field.default === undefined || field.default === null ? "" : `default ${JSON.stringify(field.default)}`;
  return [...limits, standard].filter(Boolean).join(", ");
}

const resolve = (schema, schemas) => (schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema);

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  show();
});
show();
