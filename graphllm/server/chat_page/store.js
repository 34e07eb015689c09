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
  value && typeof value.id === "string" && Array.isArray(value.messages) && value.messages.every(isMessage);

const store = {
  conversations: stored(CONVERSATIONS, Array.isArray, []).filter(isConversation),
  settings: stored(SETTINGS, (value) => value && typeof value === "object", {}),

  /** Save the conversations, the newest first; the oldest ones are dropped where room is short. */
  save() {
    for (let count = store.conversations.length; count >= 0; count--) {
      try {
        localStorage.setItem(CONVERSATIONS, JSON.stringify(store.conversations.slice(0, count)));
        return count === store.conversations.length;
      } catch {
        // The quota is exceeded, or storage is disabled.
      }
    }
    return false;
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
    return sessionStorage.getItem(KEY) || "";
  },

  set key(value) {
    sessionStorage.setItem(KEY, value);
  },
};

function newConversation() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, messages: [] };
}

/** The beginning of the first question. */
function titleOf(conversation) {
  const [first] = conversation.messages;
  const text = first ? visible(first.content).replace(/\s+/g, " ").trim() : "";
  return text ? (text.length > 60 ? `${text.slice(0, 59)}\u2026` : text) : "New conversation";
}
