"""Files in the folder of a study."""

RESULTS, REPORT, MEASURES = "results.json", "report.md", "measures.json"
#: What a step of each encoder takes in each way to keep activations and states.
WAYS = "ways.json"
BUDGET, MARGINS, SETTING = "budget.json", "margins.json", "setting.json"
#: What each file of figures was made of.
MADE_OF = "made_of.json"
#: What probes found, if they were computed.
PROBES = "probes.json"
#: What came out of trainings that were done again.
REPEATED = "repeated.json"
#: Below a study, what was trained once more.
AGAIN = "repeated"
#: In the folder of each training, by which code and where it was done.
ORIGIN = "origin.json"
