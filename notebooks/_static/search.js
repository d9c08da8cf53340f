if (typeof Search !== "undefined") {
  // An excerpt begins with the text of the page, not with its buttons.
  const htmlToText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const others = ".bd-header-article, #jb-print-docs-body";
    page.querySelectorAll(others).forEach((element) => element.remove());
    return htmlToText(page.documentElement.outerHTML, anchor);
  };

  // An index entry shows the title of its heading, and each place is shown once.
  const performSearch = Search._performSearch;
  Search._performSearch = (...query) => {
    const { alltitles, docnames, titles } = Search._index;
    const headings = new Map();
    for (const [title, places] of Object.entries(alltitles)) {
      for (const [file, id] of places) {
        const page = titles[file];
        const shown = page === title ? title : `${page} > ${title}`;
        headings.set(`${docnames[file]}#${id}`, shown);
      }
    }
    const seen = new Set();
    const isNew = (result) => {
      const place = result[0] + result[2];
      result[1] = headings.get(place) ?? result[1];
      return !seen.has(place) && seen.add(place);
    };
    return performSearch(...query).reverse().filter(isNew).reverse();
  };
}
