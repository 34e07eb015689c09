// The page: conversations at the side, messages, and the field for the next question.

// models: their names; running: the answer that is generated; edited: index of the question that is
// written again.
const page = {
  conversation: store.conversations[0] || newConversation(), models: [], running: null, edited: null,
};
const byId = (id) => document.getElementById(id);
const settings = settingsDialog();

// ------------------------------------------------------------------------------------ conversations

/** Show the list of conversations and the messages of the current one. */
function showAll() {
  const entry = (each) => h("li", {},
    h("button", {
      type: "button", class: "open", onclick: () => show(each),
      "aria-current": each === page.conversation ? "page" : null,
    }, titleOf(each)),
    h("button", {
      type: "button", class: "remove", onclick: () => remove(each),
      "aria-label": `Delete ${titleOf(each)}`,
    }, "\u00d7"));
  byId("conversations").replaceChildren(...store.conversations.map(entry));
  byId("messages").replaceChildren(...page.conversation.messages.map(messageElement));
  byId("empty").hidden = page.conversation.messages.length > 0;
}

function show(conversation) {
  stop();
  cancelEdit();
  page.conversation = conversation;
  showAll();
  showModel();
  document.body.classList.remove("listing");
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
  byId("question").focus();
}

function remove(conversation) {
  const isOwn = conversation === page.conversation;
  if (isOwn) stop();
  store.remove(conversation);
  if (isOwn) show(store.conversations[0] || newConversation());
  else showAll();
}

/** Save a conversation, which becomes the first of the list. */
function save(conversation) {
  const saved = store.save(conversation);
  byId("room").hidden = saved;
}

const say = (text) => { byId("status").textContent = text; };

// ----------------------------------------------------------------------------------------- messages

function messageElement(message, index) {
  if (message.role === "user") return questionElement(message, () => edit(index));
  return new AnswerElement(message, () => regenerate(index)).element;
}

/** Write a question again: sending it replaces the old one and what follows it; Escape cancels. */
function edit(index) {
  stop();
  page.edited = index;
  byId("question").value = page.conversation.messages[index].content;
  resizeField();
  byId("question").focus();
  say("Sending replaces the question and what follows it; Escape cancels.");
}

function cancelEdit() {
  if (page.edited === null) return;
  page.edited = null;
  byId("question").value = "";
  resizeField();
  say("");
}

/** Replace an answer, without what followed it. */
function regenerate(index) {
  stop();
  cancelEdit();
  page.conversation.messages.splice(index);
  showAll();
  answer();
}

function send() {
  const field = byId("question"), text = field.value;
  if (!text.trim() || page.running) return;
  if (page.edited !== null) page.conversation.messages.splice(page.edited);
  page.edited = null;
  page.conversation.messages.push({ role: "user", content: text });
  field.value = "";
  resizeField();
  save(page.conversation);
  showAll();
  answer();
}

/** What the model is asked: system message, questions and answers. */
function prompt() {
  const messages = page.conversation.messages
    .filter(({ role, content }) => role === "user" || content)
    .map(({ role, content }) => ({ role, content }));
  const system = String(store.settings.system || "");
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** Generate the answer to the last question. */
async function answer() {
  const { conversation } = page, body = { messages: prompt(), ...modelField(), ...samplingFields() };
  const message = { role: "assistant", content: "" };
  const running = { abort: new AbortController() };
  conversation.messages.push(message);
  const shown = new AnswerElement(message, () => regenerate(conversation.messages.indexOf(message)));
  keepAtEnd(() => byId("messages").append(shown.element));
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
  page.running = running;
  showRunning();
  shown.begin();
  await receive(message, shown, body, running.abort.signal);
  keepAtEnd(() => shown.finish());
  if (page.running === running) page.running = null;
  showRunning();
  if (!store.removed.has(conversation.id)) save(conversation);
}

/** Fill the message with what the server sends, or with the reason why it does not. */
async function receive(message, shown, body, signal) {
  const times = { sent: performance.now(), first: 0, last: 0 };
  try {
    for await (const part of answerTo(body, signal)) {
      if (part.content || part.reasoning) {
        times.last = performance.now();
        times.first ||= times.last;
      }
      if (part.content) {
        message.content += part.content;
        shown.text.append(part.content);
      } else if (part.reasoning) {
        message.reasoning = (message.reasoning || "") + part.reasoning;
        shown.think(part.reasoning);
      } else if (part.reason) {
        message.reason = part.reason;
      } else if (part.usage) {
        message.speed = speedText(part.usage, times);
      } else if (part.bill) {
        message.bill = part.bill;
      }
    }
  } catch (error) {
    if (signal.aborted) message.stopped = true;
    else if (error.status === 401 && (await useKey(error.message))) {
      return receive(message, shown, body, signal);
    } else message.error = error.status === undefined ? "the server cannot be reached" : error.message;
  }
  return undefined;
}

async function useKey(why) {
  const key = await askForKey(why);
  if (key !== null) store.key = key;
  return key !== null;
}

function stop() {
  if (page.running) page.running.abort.abort();
  page.running = null;
  showRunning();
}

function showRunning() {
  byId("stop").hidden = !page.running;
  byId("send").hidden = Boolean(page.running);
  say(page.running ? "Generating" : "");
}

// ---------------------------------------------------------------------------------------- the field

function resizeField() {
  const field = byId("question");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 2)}px`;
}

// ---------------------------------------------------------------------------------------- the model

async function findModels() {
  try {
    const { data } = await (await request("v1/models")).json();
    page.models = data.map(({ id }) => id);
    byId("models").replaceChildren(...page.models.map((id) => h("option", { value: id }, visible(id))));
    showModel();
  } catch (error) {
    if (error.status === 401 && (await useKey(error.message))) return findModels();
    say(error.status === undefined ? "The server cannot be reached." : error.message);
  }
  return undefined;
}

/** The model of the current conversation; the server's first one if it has no other, or not any more. */
function model() {
  const { models, conversation } = page;
  return models.includes(conversation.model) ? conversation.model : models[0];
}

/** Show the model, and those of the server to choose from if it has several. */
function showModel() {
  if (!page.models.length) return;
  const several = page.models.length > 1;
  byId("model").classList.toggle("hidden", several);
  byId("model").textContent = visible(model());
  byId("models").hidden = !several;
  byId("models").value = model();
  document.title = `${visible(model())}: chat`;
}

/** The field of a request; none for a server of one model, which may have another name by now. */
function modelField() {
  return page.models.length > 1 ? { model: model() } : {};
}

byId("models").addEventListener("change", () => {
  page.conversation.model = byId("models").value;
  if (page.conversation.messages.length) save(page.conversation);
  showAll();
  showModel();
});
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("question").addEventListener("input", resizeField);
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  stop();
  cancelEdit();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => show(newConversation(page.conversation.model)));
byId("adjust").addEventListener("click", () => settings.show());
byId("list").addEventListener("click", () => document.body.classList.toggle("listing"));
document.body.append(settings.dialog);
showAll();
findModels();
