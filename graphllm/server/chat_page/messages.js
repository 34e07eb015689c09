// Messages of a conversation as elements.

const LEAST_PAUSE = 30; // milliseconds between two drawings of a growing text

async function copyText(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Cannot copy";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

/** Markdown that grows at its end. Only its last block is parsed again. */
class GrowingMarkdown {
  constructor(kind) {
    this.element = h("div", { class: kind });
    this.text = "";
    this.from = 0; // where the last block begins
    this.timer = 0;
    this.pause = LEAST_PAUSE;
  }

  append(text) {
    this.text += text;
    this.timer ||= setTimeout(() => keepAtEnd(() => this.draw()), this.pause);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = 0;
    const start = performance.now(), blocks = markdownBlocks(this.text.slice(this.from));
    if (this.last) this.last.remove();
    for (const [, element] of blocks) this.element.append(element);
    if (blocks.length) {
      const [offset, element] = blocks[blocks.length - 1];
      this.last = element;
      this.from += offset;
    }
    // A text that takes long to draw is drawn less often.
    this.pause = Math.max(LEAST_PAUSE, 4 * (performance.now() - start));
  }
}

/** Change the page, and scroll to its end if it was there. */
function keepAtEnd(change) {
  const page = document.scrollingElement;
  const wasAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 60;
  change();
  if (wasAtEnd) page.scrollTop = page.scrollHeight;
}

/** A question: text as it was typed. */
function questionElement(message, edit) {
  return h("article", { class: "question", "aria-label": "You" },
    h("div", { class: "typed" }, visible(message.content)),
    h("div", { class: "actions" }, h("button", { type: "button", class: "edit", onclick: edit }, "Edit")));
}

/** An answer: reasoning, text, how it ended, and what it cost. */
class AnswerElement {
  constructor(message, regenerate) {
    this.message = message;
    this.text = new GrowingMarkdown("text");
    this.reasoning = new GrowingMarkdown("text");
    this.thoughts = h("details", { class: "thoughts", hidden: true }, h("summary", {}, "Reasoning"),
      this.reasoning.element);
    this.cost = h("p", { class: "cost" });
    this.bill = h("div");
    this.copy = h("button", { type: "button", onclick: () => copyText(this.copy, message.content) }, "Copy");
    this.element = h("article", { class: "answer", "aria-label": "Answer" }, this.thoughts,
      this.text.element, this.cost, this.bill,
      h("div", { class: "actions" }, this.copy,
        h("button", { type: "button", class: "again", onclick: regenerate }, "Regenerate")));
    if (message.reasoning) this.think(message.reasoning);
    if (message.content) this.text.append(message.content);
    this.finish();
  }

  /** Show that the answer is being generated. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
  }

  think(text) {
    this.thoughts.hidden = false;
    this.reasoning.append(text);
  }

  finish() {
    this.element.removeAttribute("aria-busy");
    this.text.draw();
    this.reasoning.draw();
    const { error, stopped, reason, speed, bill } = this.message, parts = [];
    this.bill.replaceChildren(...(bill ? [billElement(bill)] : []));
    if (error) parts.push(h("strong", { role: "alert" }, visible(error)));
    if (stopped) parts.push("stopped");
    if (reason === "length") parts.push("ended at the limit of tokens");
    if (speed) parts.push(speed);
    this.cost.replaceChildren(...parts.flatMap((part, i) => (i ? [" \u00b7 ", part] : [part])));
  }
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;

/** How fast an answer was: tokens, tokens per second after the first one, time to first token. */
function speedText(usage, times) {
  const tokens = usage.completion_tokens, parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  const span = times.last - times.first;
  if (tokens > 1 && span > 0) parts.push(`${(1000 * (tokens - 1) / span).toFixed(1)} tokens/s`);
  if (times.first) parts.push(`first token after ${seconds(times.first - times.sent)}`);
  const cached = (usage.prompt_tokens_details || {}).cached_tokens;
  parts.push(`prompt of ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  return parts.join(" \u00b7 ");
}
