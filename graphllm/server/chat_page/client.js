// Requests to the server that sent this page.

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; ServerError if it is refused. Paths are relative, for servers behind a prefix. */
async function request(path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (store.key) headers.Authorization = `Bearer ${store.key}`;
  const sent = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...sent, headers, signal });
  if (response.ok) return response;
  const value = await response.json().catch(() => ({}));
  throw new ServerError(response.status, (value.error || {}).message || response.statusText);
}

/** The objects of a stream of server-sent events, which ends with `[DONE]`. */
async function* eventsOf(response) {
  const decoder = new TextDecoder(), reader = response.body.getReader();
  let rest = "", complete = false;
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      complete ||= line === "data: [DONE]";
      if (line.startsWith("data: ") && !complete) yield JSON.parse(line.slice(6));
    }
    if (done && !complete) throw new ServerError(0, "the connection was closed in mid-answer");
    if (done) return;
  }
}

/** What an answer consists of: {content}, {reasoning}, {reason}, {usage} or {bill}, one at a time. */
async function* answerTo(body, signal) {
  const sent = { ...body, stream: true, stream_options: { include_usage: true } };
  for await (const event of eventsOf(await request("v1/chat/completions", sent, signal))) {
    if (event.error) throw new ServerError(500, event.error.message);
    for (const { delta, finish_reason } of event.choices || []) {
      if (delta && delta.reasoning_content) yield { reasoning: delta.reasoning_content };
      if (delta && delta.content) yield { content: delta.content };
      if (finish_reason) yield { reason: finish_reason };
    }
    if (event.usage) yield { usage: event.usage };
    if (event.x_profile) yield { bill: event.x_profile };
  }
}
