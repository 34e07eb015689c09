// The dialog of sampling settings. An empty field leaves the choice to the server.

// name in the API, label, least, most, step
const NUMBERS = [
  ["temperature", "Temperature; 0 always takes the likeliest token", 0, 2, 0.05],
  ["top_p", "Top-p", 0, 1, 0.01],
  ["top_k", "Top-k; 0 disables it", 0, 1000000, 1],
  ["min_p", "Min-p", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty; 1 is none", 0.1, 10, 0.05],
  ["max_tokens", "Tokens of an answer at most", 1, 1000000, 1],
  ["seed", "Seed; the same one repeats an answer", 0, 4294967295, 1],
];

/** The dialog and a function that shows it. */
function settingsDialog() {
  const system = h("textarea", { id: "system", rows: 4 });
  const inputs = NUMBERS.map(([name, , min, max, step]) =>
    h("input", { id: name, type: "number", min, max, step, inputmode: "decimal" }));
  const profile = h("input", { id: "x_profile", type: "checkbox" });
  const field = (id, label, input) => h("p", {}, h("label", { for: id }, label), input);
  const form = h("form", { method: "dialog" },
    h("h2", { id: "settings-title" }, "Settings"),
    field("system", "System message", system),
    NUMBERS.map(([name, label], i) => field(name, label, inputs[i])),
    h("p", {}, h("label", { class: "check" }, profile, "Show what each answer cost, op by op")),
    h("p", { class: "actions" },
      h("button", { type: "button", onclick: () => form.reset() }, "Clear"),
      h("button", { type: "submit", class: "main" }, "Save")));
  const dialog = h("dialog", { id: "settings", "aria-labelledby": "settings-title" }, form);
  form.addEventListener("submit", () => {
    const values = { system: system.value, x_profile: profile.checked };
    NUMBERS.forEach(([name], i) => {
      if (inputs[i].value !== "") values[name] = Number(inputs[i].value);
    });
    store.saveSettings(values);
  });
  const show = () => {
    system.value = String(store.settings.system || "");
    profile.checked = store.settings.x_profile === true;
    NUMBERS.forEach(([name], i) => {
      const value = store.settings[name];
      inputs[i].value = typeof value === "number" ? value : "";
    });
    dialog.showModal();
  };
  return { dialog, show };
}

/** Fields of a request. */
function samplingFields() {
  const known = NUMBERS.map(([name]) => name).filter((name) => typeof store.settings[name] === "number");
  const profile = store.settings.x_profile === true ? { x_profile: true } : {};
  return { ...Object.fromEntries(known.map((name) => [name, store.settings[name]])), ...profile };
}

/** Ask for the API key; the promise has it, or null if the user cancels. */
function askForKey(why) {
  return new Promise((done) => {
    const input = h("input", { id: "key", type: "password", autocomplete: "off", required: true });
    const form = h("form", { method: "dialog" }, h("h2", { id: "key-title" }, "API key"), h("p", {}, visible(why)),
      h("p", {}, h("label", { for: "key" }, "Key, kept until this window is closed"), input),
      h("p", { class: "actions" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        h("button", { type: "submit", class: "main" }, "Continue")));
    const dialog = h("dialog", { "aria-labelledby": "key-title" }, form);
    form.addEventListener("submit", () => { dialog.returnValue = input.value; });
    dialog.addEventListener("close", () => {
      dialog.remove();
      done(input.value && dialog.returnValue === input.value ? input.value : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
