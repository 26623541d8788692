// For the keyboard and for who hears the page, what Material leaves out: a name of its search dialog, and the way
// to the columns of a table that is wider than the window.
const reach = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap"))
    table.tabIndex = table.scrollWidth > table.clientWidth ? 0 : -1;
};
document.querySelector(".md-search").ariaLabel = "Search";
addEventListener("resize", reach);
document$.subscribe(reach);
