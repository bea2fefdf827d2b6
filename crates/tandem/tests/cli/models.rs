use super::tandem;

#[test]
fn an_empty_store_says_how_to_fill_it() {
    let ran = tandem(&["list"]).run();
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""));
    assert!(ran.err.contains("hint: tandem pull NAME, such as smollm2"), "{}", ran.err);
    assert_eq!(tandem(&["ls", "--json"]).ok(), "[]\n");
}

#[test]
fn what_is_not_there_cannot_be_removed() {
    let ran = tandem(&["rm", "nothing"]).run();
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.err, "error: `nothing` is not in the store\nhint: `tandem list` shows what is\n");
}
