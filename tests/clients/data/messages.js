// What test_anthropic_node.py runs: asks in every way, prints one JSON object.
const Anthropic = require("@anthropic-ai/sdk");

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const GET_TIME = {
  name: "get_time",
  input_schema: { type: "object", properties: { zone: { type: "string", maxLength: 8 } }, required: ["zone"] },
};

async function main() {
  const messages = [{ role: "user", content: process.env.QUESTION }];
  const asked = { model: "smollm2-135m", messages, max_tokens: 8, temperature: 0 };
  const told = {};
  told.whole = (await client.messages.create(asked)).content[0].text;
  told.streamed = await client.messages.stream(asked).finalText();
  const tools = { tools: [GET_TIME], tool_choice: { type: "any" }, max_tokens: 64 };
  told.call = (await client.messages.create({ ...asked, ...tools })).content.find(({ type }) => type === "tool_use").input;
  console.log(JSON.stringify(told));
}

main();
