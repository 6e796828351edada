"""Files in the folder of a study."""

RESULTS, REPORT, MEASURES = "results.json", "report.md", "measures.json"
BUDGET, MARGINS, SETTING = "budget.json", "margins.json", "setting.json"
#: What each file of figures was made of.
MADE_OF = "made_of.json"
#: What probes found, if they were computed.
PROBES = "probes.json"
#: What came out of trainings that were done again.
REPEATED = "repeated.json"
#: In the folder of each training, by which code and where it was done.
ORIGIN = "origin.json"
