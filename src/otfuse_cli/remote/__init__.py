"""Files that lie in object stores, on the web and on hubs: named, read by ranges, uploaded."""
