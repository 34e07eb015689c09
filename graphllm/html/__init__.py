"""HTML pages in one file, which need no network and run no script but their own."""
