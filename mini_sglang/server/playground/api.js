// Talks to the server: the chat as a stream of chunks, and every failure as an Error with a message for people.

/** The JSON answer to a GET. */
export async function getJson(path, key) {
  const response = await request(path, { headers: authorization(key) });
  return response.json();
}

/** Sends a chat and yields the chunks of its stream as they come. */
export async function* streamChat(body, { key, signal }) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("the stream ended before the answer was complete");
}

const authorization = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server cannot be reached");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const error = new Error(answer?.error?.message ?? `the server answered with status ${response.status}`);
  throw Object.assign(error, { status: response.status });
}

/** The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
    }
  }
}
