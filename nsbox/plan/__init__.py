"""(Spec, Host) → Plan: pure steps that decide what a launch will do, before anything is done."""
