"""The paper's numbers about bytes and downstream scores (section 5), and the name of the rows that they are held to."""

COUNTED, WON, LOST = 160, 93, 22
"""Paired comparisons with KVzip keeping its full cache, and how many of them ContourKV wins and loses."""
LEAST_LOST, MOST_LOST = 14.1, 62.2
"""Points that enforcing the nominal budget on one fixed selection costs."""
SEEN = 87.6
"""Points of a retrieval gap that ranking with the question in view explains."""
ENFORCING, SEEING = f"{LEAST_LOST} to {MOST_LOST}", f"{SEEN}"

POOLED = "informative accuracy tasks"
"""Name, in the column `task`, of a row over all accuracy tasks that the full cache answers well enough to count."""
