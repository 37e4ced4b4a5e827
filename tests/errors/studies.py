"""Triggers of the section "The paper's items" of swd_lens/ERRORS.md."""

from swd_lens.study import paper
from tests.errors.triggers import trigger


@trigger
def paper_unknown_item(folder, patch):
    paper.settings_of("singel-matrix", "tiny")


@trigger
def paper_unknown_profile(folder, patch):
    paper.settings_of("audit", "large")


@trigger
def paper_item_without_profile(folder, patch):
    paper.plan("edit", "qwen2.5-3b")


@trigger
def paper_unknown_setting(folder, patch):
    paper.settings_of("audit", "tiny").changed(layer=3)


@trigger
def paper_setting_of_another_type(folder, patch):
    paper.settings_of("audit", "tiny").changed(layers=3)


@trigger
def paper_folder_without_items(folder, patch):
    paper.results_in(folder)
