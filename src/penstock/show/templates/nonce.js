// Runs before Bokeh, and gives the page's nonce to the style elements that Bokeh makes: browsers ignore others.
"use strict";
(() => {
  const nonce = document.querySelector("style").nonce;
  const make = document.createElement.bind(document);
  document.createElement = (...given) => {
    const made = make(...given);
    if (made instanceof HTMLStyleElement) made.nonce = nonce;
    return made;
  };
})();
