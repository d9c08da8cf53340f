if (typeof Search !== "undefined") {
  // An excerpt begins with the text of the page, not with its buttons.
  const htmlToText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const others = ".bd-header-article, #jb-print-docs-body";
    page.querySelectorAll(others).forEach((element) => element.remove());
    return htmlToText(page.documentElement.outerHTML, anchor);
  };

  // Sphinx finds the pages that have all words, and gives nearly all of them one score.
  // Here a place is a heading with its index entries. It gets the rarity of each word
  // that it has, half of it for a word in the title of its page, and for a word in the
  // text of its page a share that is larger if fewer pages have the word.
  const stemmer = new Stemmer();
  const inFull = (word) => word.replace(/^(b?)fp?(?=8|16|32)/, "$1float");
  const wordsOf = (text) =>
    splitQuery(text.toLowerCase()).map((word) => inFull(stemmer.stemWord(word)));

  const readPlaces = ({ alltitles, indexentries }) => {
    const places = new Map();
    for (const [title, all] of Object.entries(alltitles)) {
      for (const [file, id] of all) {
        places.set(`${file}#${id ?? ""}`, { file, id, title, words: wordsOf(title) });
      }
    }
    for (const [entry, all] of Object.entries(indexentries)) {
      for (const [file, id, isMain] of all) {
        // Others are public names. The title of a page has no id.
        const place = places.get(`${file}#${id}`) ?? places.get(`${file}#`);
        if (isMain) place.words.push(...wordsOf(entry));
      }
    }
    return [...places.values()];
  };

  const findPlaces = (asked) => {
    const { docnames, filenames, titles, terms } = Search._index;
    const places = readPlaces(Search._index);
    const words = [...asked].map((term) => {
      const word = inFull(term);
      const files = new Set([terms[term] ?? [], terms[word] ?? []].flat());
      const headings = places.filter((place) => place.words.includes(word));
      const number = headings.length + files.size + 0.5;
      return { word, files, rarity: Math.log((places.length + 1) / number) };
    });
    const results = places.map((place) => {
      const { file, id, title } = place;
      const page = titles[file];
      const wordsOfPage = wordsOf(page);
      let score = -place.words.length / 1000;
      for (const { word, files, rarity } of words) {
        if (place.words.includes(word)) score += rarity;
        else if (wordsOfPage.includes(word)) score += rarity / 2;
        else if (files.has(file)) score += rarity / files.size;
      }
      const isOwn = title === page || words.some(({ word }) => place.words.includes(word));
      return [
        docnames[file],
        title === page ? title : `${page} > ${title}`,
        id ? `#${id}` : "",
        null,
        isOwn ? score : 0,
        filenames[file],
        SearchResultKind.title,
      ];
    });
    results.sort((a, b) => a[4] - b[4]);
    const best = results.at(-1)[4];
    return results.filter((result) => result[4] > 0.4 * best);
  };

  // The last result is shown first.
  Search._performSearch = (query, terms, excluded, highlighted, names) => [
    ...[...names].flatMap((name) => Search.performObjectSearch(name, names)),
    ...findPlaces(terms),
  ];
}
