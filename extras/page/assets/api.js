// Asks the server. An error has the sentence that the server gives.

(() => {
  "use strict";

  async function get(path, parameters = {}, signal = undefined) {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined));
    const text = query.toString();
    let answer;
    try {
      answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the page's server does not answer: is `rollmill page` still running?");
    }
    const told = await answer.json().catch(() => ({ detail: `the server answered ${answer.status}` }));
    if (!answer.ok) throw new Error(told.detail ?? `the server answered ${answer.status}`);
    return told;
  }

  Rollmill.api = { get };
})();
