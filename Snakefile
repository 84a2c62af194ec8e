include: "workflow/Snakefile"


workflow.default_target = "all"
