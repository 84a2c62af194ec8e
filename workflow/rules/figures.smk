# The figures, each from tables alone. A rule a figure: `snakemake --cores 1 --force fig1_recovered` redraws that one.
FIGURES = {
    "fig1_recovered": ["recovered"],
    "fig2_cells": ["cells"],
    "fig_kappa": ["kappa_quantiles"],
    "fig_prediction": ["prediction", "content_arms"],
    "fig_certificate": ["certificates"],
    "fig_pools": ["pools"],
    "fig_predictors": ["predictors"],
    **{f"fig_{table}": [table] for table in MORE_TABLES if table != "structured_cells"},
}


for figure, tables in FIGURES.items():

    rule:
        name:
            figure
        input:
            expand("<results>/tables/{table}.csv", table=tables),
        output:
            pdf=f"<results>/figures/{figure}.pdf",
            png=shown(f"<results>/figures/{figure}.png", figure, *tables),
        log:
            f"<logs>/figures/{figure}.log",
        benchmark:
            f"<benchmarks>/figures/{figure}.tsv"
        conda:
            "../../envs/contourkv.yaml"
        resources:
            mem_mb=memory(1000),
        params:
            figure=figure,
            code=code("figure.py"),
            locked=locked("figure.py"),
        message:
            f"draw {figure}"
        script:
            "../scripts/figure.py"


rule figures_all:
    input:
        expand("<results>/figures/{figure}.{ending}", figure=FIGURES, ending=["pdf", "png"]),
    message:
        "every figure is drawn"
