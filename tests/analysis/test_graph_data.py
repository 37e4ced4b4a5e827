"""Tables of a graph: types of their columns, plain values, and names that people read."""

from swd_lens.analysis.graph.data import EDGES, NODES, GraphData, records, table


def test_rows_become_typed_columns_and_plain_values_again():
    rows = [{"node": "token@0", "kind": "token", "position": 0, "label": "·a"}, {"node": "x/1", "kind": "unit", "score": 0.5}]
    nodes = table(rows, NODES)
    assert nodes["position"].dtype == "Int64" and nodes["position"].isna().tolist() == [False, True]
    assert [{k: v for k, v in row.items() if v is not None} for row in records(nodes)] == rows
    assert table([], EDGES).columns.tolist() == list(EDGES)


def test_tokens_are_called_by_their_text_as_far_as_it_tells_them_apart():
    labels = [("token@0", "token", "·a"), ("logit 3", "logit", "·b"), ("logit 4", "logit", "·b"), ("x/1", "unit", "")]
    nodes = table([dict(zip(("node", "kind", "label"), each, strict=True)) for each in labels], NODES)
    edges = table([{"source": "token@0", "target": "logit 3", "kind": "residual", "weight": 1.0}], EDGES)
    graph = GraphData(nodes, edges, {"token_ids": None})
    assert graph.shown_names() == {"token@0": "token@0 ·a", "logit 3": "logit 3", "logit 4": "logit 4", "x/1": "x/1"}
    assert graph.table().iloc[0][["source", "target", "weight"]].tolist() == ["token@0 ·a", "logit 3", 1.0]
    assert "contribution" not in graph.table() and graph.table(0).empty
