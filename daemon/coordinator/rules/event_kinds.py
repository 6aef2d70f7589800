"""Kinds of events in the history of a job. A test compares them with the code that makes events."""

EVENT_KINDS = {
    "submitted": "The coordinator has taken the job.",
    "placed": "Nodes were chosen, and are told to begin. Begins a generation.",
    "engine_ready": "The engine of a node listens for the others.",
    "rank_started": "Ranks of a node were started.",
    "state": "The job has another state; the reason begins with it.",
    "waiting": "The job waits, for the reason that is told: for nodes, for newcomers, or ranks for each other.",
    "asked": "Somebody asked for a change: scale, pause, resume, or a node is drained.",
    "newcomers": "Ranks were started that shall join.",
    "newcomers_lost": "Newcomers ended, or are not needed any more, before they had joined.",
    "suspended": "A node holds the step, because something was lost.",
    "regrouped": "The job goes on with other members: the next generation.",
    "stopped": "Ranks that had left, and did not end by themselves, were stopped.",
    "patience": "Steps of an elastic job take long: a silent host has longer, and so have nodes without a coordinator.",
    "rank_exited": "Ranks of a node ended.",
    "node_error": "A node can't go on with its part of the job; in its words.",
    "node_stopped": "Nothing of the job is left on a node.",
    "cancel_requested": "Somebody asked for the end of the job.",
}
