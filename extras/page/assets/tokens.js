// A turn that the policy wrote: a span for each token, parts such as thinking and tool calls set off, and a line that tells of
// the token under the pointer or at the arrow keys.

(() => {
  "use strict";

  const { el, known, num } = Rollmill.dom;

  const PARTS = [["<think>", "</think>", "thinking"], ["<tool_call>", "</tool_call>", "tool call"], ["<tool_response>", "</tool_response>", "tool result"]];
  const AT_ONCE = 3000; // tokens that are made before the page is shown; the others follow
  const SPECIAL = /^<[|｜]?[\w▁ .-]+[|｜]?>$/;
  const SHADES = 5;

  function written(turn, sequence, shade) {
    const told = el("p", { class: "told", "aria-live": "polite" });
    const text = el("div", { class: "text tokens", tabindex: "0", role: "group", "aria-label": "what the policy wrote; arrow keys read its tokens" });
    const versions = turn.spans.flatMap((span) => Array(span.tokens).fill(span));
    const newest = Math.max(0, ...turn.spans.map((span) => span.version));
    let at = -1;

    const span = (n) => {
      const made = el("span", { "data-n": n, class: SPECIAL.test(turn.tokens[n].trim()) && turn.tokens[n].trim() ? "special" : null }, turn.tokens[n]);
      if (shade === "logprob") made.classList.add(`s${heat(turn.logprobs[n])}`);
      if (shade === "version") made.classList.add(`s${Math.min(SHADES, newest - versions[n].version)}`);
      return made;
    };
    fillIn(text, turn.tokens, span);

    const show = (n) => {
      text.querySelector(".here")?.classList.remove("here");
      at = n;
      if (n < 0) {
        told.textContent = "";
        return;
      }
      text.querySelector(`[data-n="${n}"]`)?.classList.add("here");
      told.textContent = about(turn, sequence, versions[n], n);
    };
    const under = (event) => {
      const found = event.target.closest?.("[data-n]");
      if (found) show(Number(found.dataset.n));
    };
    text.addEventListener("pointerover", under);
    text.addEventListener("click", under);
    text.addEventListener("pointerleave", () => show(-1));
    text.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      show(Math.min(Math.max(at + step, 0), turn.tokens.length - 1));
      text.querySelector(".here")?.scrollIntoView({ block: "nearest" });
      event.preventDefault();
    });
    const old = new Set(turn.spans.map((one) => one.version));
    return el("li", { class: "turn policy" },
      el("h4", {}, sequence.policy, el("small", {}, ` ${turn.tokens.length} tokens, ${old.size > 1 ? `v${Math.min(...old)} to v${newest}` : `v${newest}`}, mean log-probability ${num(mean(turn.logprobs))}`)),
      text, told);
  }

  function about(turn, sequence, span, n) {
    const use = sequence.use;
    const masked = use && use.trained_from && span.version < use.trained_from;
    const advantage = !use ? "in no batch" : masked ? "masked" : use.advantage === null ? use.why : num(use.advantage);
    const logprob = turn.logprobs[n];
    return [`${JSON.stringify(turn.tokens[n])} (id ${turn.ids[n]})`, `log-probability ${num(logprob)}${known(logprob) ? ` (p ${num(Math.exp(logprob))})` : ""}`,
      turn.teacher_logprobs.length > n && `teacher ${num(turn.teacher_logprobs[n])}`, `version ${span.version}`, `advantage ${advantage}`,
      known(span.temperature) && span.temperature !== 1 && `temperature ${num(span.temperature)}`, span.mixed_cache && "on a cache of two versions"].filter(Boolean).join(" · ");
  }

  // The likelier, the fainter: 0 for a sure token, 5 for one of less than 1%.
  const heat = (logprob) => (known(logprob) ? Math.min(SHADES, Math.floor(-logprob * 1.1)) : 0);

  function mean(values) {
    const found = values.filter(known);
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
  }

  // Tokens into the text, those between the marks of a part into a block of their own. A mark may be cut into several tokens.
  function fillIn(text, tokens, span) {
    const ends = [];
    let length = 0;
    for (const token of tokens) ends.push((length += token.length));
    const whole = tokens.join("");
    const parts = found(whole);
    let n = 0;
    const step = (most) => {
      const last = Math.min(tokens.length, n + most);
      let block = null;
      let of = null;
      const made = document.createDocumentFragment();
      for (; n < last; n++) {
        const begin = ends[n] - tokens[n].length;
        const part = parts.find((one) => begin >= one.begin && begin < one.end) ?? null;
        if (part !== of) {
          of = part;
          block = part && (part.block ??= el("div", { class: "part", "data-part": part.name }));
          if (block && !block.parentNode) made.append(block);
        }
        (block ?? made).append(span(n));
      }
      text.append(made);
      if (n < tokens.length) requestAnimationFrame(() => step(AT_ONCE));
    };
    step(AT_ONCE);
  }

  function found(whole) {
    const parts = [];
    for (const [open, close, name] of PARTS) {
      let at = whole.indexOf(open);
      while (at >= 0) {
        const end = whole.indexOf(close, at);
        parts.push({ begin: at, end: end < 0 ? whole.length : end + close.length, name });
        at = end < 0 ? -1 : whole.indexOf(open, end);
      }
    }
    return parts;
  }

  Rollmill.tokens = { written };
})();
