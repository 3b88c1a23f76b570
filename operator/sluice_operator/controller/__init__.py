"""The controller: work queue, reconciler, leader election, status and events."""
