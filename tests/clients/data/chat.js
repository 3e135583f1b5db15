// What test_openai_node.py runs: asks in every way, prints one JSON object.
const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const GET_TIME = {
  name: "get_time",
  parameters: { type: "object", properties: { zone: { type: "string", maxLength: 8 } }, required: ["zone"] },
};

async function main() {
  const model = (await client.models.list()).data[0].id;
  const messages = [{ role: "user", content: process.env.QUESTION }];
  const chat = { model, messages, max_tokens: 8, temperature: 0 };
  const told = {};
  told.whole = (await client.chat.completions.create(chat)).choices[0].message.content;
  told.streamed = "";
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...chat, ...options }))
    told.streamed += chunk.choices[0]?.delta?.content ?? "";
  told.helper = (await client.chat.completions.stream(chat).finalChatCompletion()).choices[0].message.content;
  const tools = { tools: [{ type: "function", function: GET_TIME }], tool_choice: "required", max_tokens: 64 };
  told.call = (await client.chat.completions.create({ ...chat, ...tools })).choices[0].message.tool_calls[0].function;
  const asked = { model, input: process.env.QUESTION, max_output_tokens: 8, temperature: 0 };
  told.response = (await client.responses.create(asked)).output_text;
  told.response_streamed = "";
  for await (const event of client.responses.stream(asked))
    if (event.type === "response.output_text.delta") told.response_streamed += event.delta;
  const prompt = { model, prompt: "The capital of France is", max_tokens: 2, temperature: 0 };
  told.completion = (await client.completions.create(prompt)).choices[0].text;
  told.refused = await client.chat.completions.create({ ...chat, audio: {} }).catch(({ status, param }) => ({ status, param }));
  console.log(JSON.stringify(told));
}

main();
