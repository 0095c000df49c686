// Before Bokeh: gives the style elements that it makes the page's own nonce, without which the browser does not apply them.
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
