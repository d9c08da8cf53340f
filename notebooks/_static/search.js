// An excerpt in the search begins with the text of the page, not with its buttons.
if (typeof Search !== "undefined") {
  const htmlToText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const others = ".bd-header-article, #jb-print-docs-body";
    page.querySelectorAll(others).forEach((element) => element.remove());
    return htmlToText(page.documentElement.outerHTML, anchor);
  };
}
