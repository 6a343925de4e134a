"use strict";
// What a page of words, tables and figures lacks of a run's page: tables that sort, links to Perfetto, a timeline.

function connectTables() {}
function connectPerfetto() {}
function connectTimeline() {}
