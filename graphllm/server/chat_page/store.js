// Conversations and settings, kept in the browser; the API key only until the window is closed.

const CONVERSATIONS = "graphllm.conversations", SETTINGS = "graphllm.settings", KEY = "graphllm.key";

/** A value of the browser's storage; `otherwise` if it is missing or damaged. */
function stored(name, valid, otherwise) {
  try {
    const value = JSON.parse(localStorage.getItem(name));
    return valid(value) ? value : otherwise;
  } catch {
    return otherwise;
  }
}

const isBill = (value) => value && Array.isArray(value.rows) &&
  value.rows.every((row) => row && typeof row.name === "string" && typeof row.ns === "number");
const isMessage = (value) =>
  value && typeof value.content === "string" && ["user", "assistant"].includes(value.role) &&
  (value.bill === undefined || isBill(value.bill));
const isConversation = (value) =>
  value && typeof value.id === "string" && Array.isArray(value.messages) && value.messages.every(isMessage) &&
  ["string", "undefined"].includes(typeof value.model);

const store = {
  conversations: stored(CONVERSATIONS, Array.isArray, []).filter(isConversation),
  settings: stored(SETTINGS, (value) => value && typeof value === "object", {}),
  removed: new Set(), // ids of conversations that this window deleted

  /**
   * Save a conversation as the newest one; one without messages is deleted. Those of other windows are
   * kept, and the oldest ones are dropped where room is short. Returns whether everything was saved.
   */
  save(changed) {
    const own = changed.messages.length ? [changed] : [];
    const others = new Map(store.conversations.map((each) => [each.id, each]));
    const found = stored(CONVERSATIONS, Array.isArray, []).filter(isConversation);
    for (const each of found) if (!others.has(each.id)) others.set(each.id, each);
    others.delete(changed.id);
    const kept = [...others.values()].filter((each) => each.messages.length && !store.removed.has(each.id));
    store.conversations = [...own, ...kept];
    let count = store.conversations.length;
    const texts = store.conversations.map((each) => JSON.stringify(each));
    for (; count >= own.length; count--) {
      try {
        localStorage.setItem(CONVERSATIONS, `[${texts.slice(0, count)}]`);
        return count === texts.length;
      } catch {
        // The quota is exceeded, or storage is disabled: what is stored stays.
      }
    }
    return false;
  },

  /** Delete a conversation, also from the browser's storage. */
  remove(conversation) {
    store.removed.add(conversation.id);
    store.save({ ...conversation, messages: [] });
  },

  saveSettings(settings) {
    store.settings = settings;
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(settings));
    } catch {
      // Storage is disabled: the settings are lost with the window.
    }
  },

  get key() {
    try {
      return sessionStorage.getItem(KEY) || store.unsavedKey;
    } catch {
      return store.unsavedKey;
    }
  },

  set key(value) {
    store.unsavedKey = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // Storage is disabled: the key is kept until the page is reloaded.
    }
  },

  unsavedKey: "",
};

/** `model`: its name, for a server of several; undefined for the server's choice. */
function newConversation(model) {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, model, messages: [] };
}

/** The beginning of the first question. */
function titleOf(conversation) {
  const [first] = conversation.messages;
  const text = first ? visible(first.content).replace(/\s+/g, " ").trim() : "";
  return text ? (text.length > 60 ? `${text.slice(0, 59)}\u2026` : text) : "New conversation";
}
