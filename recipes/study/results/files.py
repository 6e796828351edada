"""Files in the folder of a study."""

RESULTS, REPORT, MEASURES = "results.json", "report.md", "measures.json"
BUDGET, MARGINS, SETTING = "budget.json", "margins.json", "setting.json"
#: What each file of figures was made of.
MADE_OF = "made_of.json"
#: Figures that are there if they were computed, by their name among the figures.
MORE_FIGURES = {"baseline": "baseline.json", "probes": "probes.json"}
